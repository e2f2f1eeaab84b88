"""Tune the Triton kernels for this machine's GPU. The package then uses the configurations that were found.

    python -m benchmarks.tune                                   two large layers, a few minutes
    python -m benchmarks.tune --shapes 16384,2048,768,128,8     T, D, F, E, K of your own layer
    python -m benchmarks.tune --out mine.json                   write to another file, to look at it first
    python -m benchmarks.tune --num-sms 0                       for products that use the whole GPU

Each product of an expert MLP is timed with a list of configurations that fit the registers and the shared memory. Those
whose result differs from plain torch are dropped. The fastest three then take turns with the current configuration,
which is replaced only by one that is clearly faster. The file keeps its entries for other kernels, sizes and GPUs.
Products run on the multiprocessors that training with expert parallelism leaves to them, unless --num-sms says another
number.
Worker processes compile ahead, as in precompile.py.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .gpu.shapes import SHAPES, SMOKE_SHAPES, Shape


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.tune", description=__doc__, formatter_class=raw)
    parser.add_argument("--shapes", nargs="+", help="layers to tune, each as T,D,F,E,K")
    parser.add_argument("--out", type=Path, help="file to write (default: the table that the package reads)")
    parser.add_argument("--num-sms", type=int, help="multiprocessors for products; 0: all (default: all but 20)")
    parser.add_argument("--smoke", action="store_true", help="test this command on a CPU, in Triton's interpreter")
    parser.add_argument("--worker", nargs=3, type=int, help=argparse.SUPPRESS)  # product, part, parts
    return parser.parse_args(arguments)


def shapes_of(options: argparse.Namespace) -> tuple[Shape, ...]:
    """The shapes to tune. Raises ValueError for an invalid --shapes."""
    if not options.shapes:
        return SMOKE_SHAPES if options.smoke else SHAPES[:2]
    found = []
    for text in options.shapes:
        try:
            T, D, F, E, K = (int(number) for number in text.split(","))
        except ValueError:
            raise ValueError(f"--shapes needs five integers each, T,D,F,E,K: got {text!r}") from None
        if min(T, D, F, E, K) < 1 or K > E:
            raise ValueError(f"--shapes: sizes must be at least 1, and K at most E: got {text!r}")
        if D % 8 or F % 8:
            raise ValueError(f"--shapes: D and F must be multiples of 8, as only these are tuned: got {text!r}")
        found.append(Shape(T, D, F, E, K))
    return tuple(found)


def table(out: Path | None) -> Path:
    """Check the output file before the long run. Raises OSError or ValueError if it is not writable or not a table."""
    from moe_dualpipe.kernels.gpu.configs import load_table, user_table_path

    path = out or user_table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        load_table(path)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.smoke:  # must be set before the first kernel module is imported
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        shapes = shapes_of(options)
        if not options.smoke and not torch.cuda.is_available():
            raise ValueError("no GPU found: use --smoke to test the command on a CPU")
        if (options.num_sms or 0) < 0:
            raise ValueError(f"--num-sms must be at least 0, for all: got {options.num_sms}")
        if options.smoke and not options.out:
            raise ValueError("--smoke needs --out, because its results must not enter the table of the package")
        out = table(options.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"benchmarks.tune: error: {error}\n")
        return 2
    device = torch.device("cpu" if options.smoke else "cuda")
    from moe_dualpipe.runtime.groups import product_sms

    from .gpu import tuning

    num_sms = product_sms(device) if options.num_sms is None else options.num_sms or None
    if options.worker:
        tuning.compile_share(shapes[0], device, *options.worker)
        return 0
    for shape in shapes:
        tuning.tune_shape(shape, device, out, num_sms)
    print(f"\nwritten to {out}{'' if options.out else ', which the package now uses'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
