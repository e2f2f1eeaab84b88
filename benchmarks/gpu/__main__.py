"""Every check and benchmark that needs a GPU, in one command and a limited time.

    python -m benchmarks.gpu --out runs/h200                         everything: 8 minutes on one GPU
    python -m benchmarks.gpu --out runs/h200 --only experts          one section, or several
    python -m benchmarks.gpu --out runs/h200 --contestants triton liger my_module:prepare
    python -m benchmarks.gpu --out /tmp/smoke --smoke                without a GPU: does the suite itself work?

Writes results.json (after every measurement), results.md and, with matplotlib, figures. Peers are timed if they are
importable and agree with fp64. Exits with 1 if GPU tests failed, and 2 for arguments that make no sense.
"""

import argparse
import importlib
import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# name -> (module, share of the whole time after which it must end)
SECTIONS = {
    "tests": ("gpu_tests", 0.35),
    "experts": ("experts", 0.62),
    "permute": ("permute", 0.65),
    "routing": ("routing", 0.68),
    "overlap": ("overlap", 0.8),
    "training": ("training", 1.0),
}
PACKAGES = ("torch", "triton", "numpy", "liger-kernel", "scattermoe", "sonicmoe")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--minutes", type=float, default=8.0, help="what does not fit is skipped (default: 8)")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="sections")
    parser.add_argument("--contestants", nargs="+", help="of the experts section; your own as module:function")
    parser.add_argument("--tuning-shapes", type=int, default=2, help="shapes for peers that tune themselves")
    parser.add_argument("--training-seconds", type=float, default=60.0, help="of each training run")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU, in Triton's interpreter")
    return parser.parse_args(arguments)


def validate_options(options: argparse.Namespace) -> None:
    """Raises ValueError for numbers that make no sense."""
    for name in ("minutes", "training_seconds"):
        if not 0 < getattr(options, name) < math.inf:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be a positive number: got {getattr(options, name):g}")
    if options.tuning_shapes < 0:
        raise ValueError(f"--tuning-shapes must be at least 0: got {options.tuning_shapes}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.smoke:  # read when a kernel's module is imported: before any of those below
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    import torch

    from . import report
    from .context import Context
    from .implementations import BUILT_IN, find_implementation

    names = tuple(options.contestants or BUILT_IN)
    try:
        validate_options(options)
        for name in names:
            find_implementation(name)
        if not options.smoke and not torch.cuda.is_available():
            raise ValueError("there is no GPU here: --smoke tries the suite out on a CPU")
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"benchmarks.gpu: error: {error}\n")
        return 2
    context = Context(
        device=torch.device("cpu" if options.smoke else "cuda"), smoke=options.smoke, out=options.out.resolve(),
        implementations=names, tuning_shapes=options.tuning_shapes, training_seconds=options.training_seconds,
        deadline=0.0,
    )  # fmt: skip
    context.results["about"] = environment(context)
    run_sections(context, options)
    (context.out / "results.md").write_text(report.markdown(context.results))
    draw_figures(context)
    print(f"\n{report.terminal_summary(context.results)}\n\nwritten to {context.out}")
    return exit_code(context, options)


def run_sections(context: Any, options: argparse.Namespace) -> None:
    """One after the other, each to its share of the time; one that fails is reported, and the next begins."""
    from .measure import error_summary, measure_ceilings

    start, total = time.monotonic(), 60 * options.minutes
    last = [name for name in SECTIONS if name in options.only][-1]
    context.results["ceilings"] = measure_ceilings(context.clock, context.smoke)
    context.save()
    for name in SECTIONS:
        if name not in options.only:
            continue
        module, share = SECTIONS[name]
        # A section that comes last, or alone, has all the time that is left.
        context.deadline = start + total * (1.0 if name == last else share)
        print(f"\n{name}: {context.seconds_left():.0f} s", flush=True)
        record: dict[str, Any] = {}
        context.results[name] = record
        if context.seconds_left() < 5:
            record.update(status="skipped", reason=f"skipped, --minutes {options.minutes:g} were spent before")
            print(f"  {record['reason']}")
            continue
        begun = time.monotonic()
        try:
            importlib.import_module(f".{module}", __package__).run(context, record)
        except Exception as error:
            record.update(status="failed", reason=f"failed, {error_summary(error)}")
            print(f"  {record['reason']}", flush=True)
        record["wall_seconds"] = round(time.monotonic() - begun, 1)
        context.save()
    context.results["wall_seconds"] = round(time.monotonic() - start, 1)
    context.save()


def environment(context: Any) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    import torch

    from moe_dualpipe.kernels.gpu.configs import user_table_path

    versions = {name: version for name in PACKAGES if (version := _version(name))}
    on_gpu = context.device.type == "cuda"
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "cuda": torch.version.cuda, "python": platform.python_version(), "versions": listed,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "smoke": context.smoke,
        "kernel_table": "tuned here, then the shipped table" if user_table_path().exists() else "the shipped table",
        "random_data": "standard normal, bf16-exact; experts drawn evenly without replacement",
    }  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def draw_figures(context: Any) -> None:
    from . import figures

    try:
        for path in figures.draw(context.results, context.out):
            print(f"drew {path}")
    except ImportError as error:
        print(f"no figures: {error}")


def exit_code(context: Any, options: argparse.Namespace) -> int:
    """1 if the GPU tests were asked for and did not pass, a section failed, or our own operators were wrong."""
    from .gpu_tests import is_acceptable
    from .implementations import OURS

    results = context.results
    failed = any(results[name].get("status") == "failed" for name in options.only)
    untested = "tests" in options.only and not is_acceptable(results["tests"], context.smoke)
    outcomes = [e["contestants"] for e in results.get("experts", {}).get("shapes", [])]
    wrong = any(o.get(name, {}).get("status") in ("wrong", "failed") for o in outcomes for name in OURS)
    return int(failed or untested or wrong)


if __name__ == "__main__":
    sys.exit(main())
