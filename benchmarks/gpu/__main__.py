"""Run all GPU tests and benchmarks, or some, within a time limit.

    python -m benchmarks.gpu --plan                                  the commands for half an hour on a GPU
    python -m benchmarks.gpu --out runs/h200                         everything: 8 minutes on one GPU
    python -m benchmarks.gpu --out runs/h200 --only experts          some sections only
    python -m benchmarks.gpu --out runs/h200 --contestants triton liger my_module:my_function
    python -m benchmarks.gpu --out /tmp/smoke --smoke                try the suite without a GPU

Each section is a process of its own, because an illegal access ends all that a process does on a GPU. results.json is
written after each comparison and results.md after each section: one row for each rate, time or loss. Other libraries
are timed if they are named, installed and agree with fp64; those that autotune take minutes at each shape. Exit code 1:
GPU tests or a section failed, or this project's operators are wrong. Exit code 2: invalid options.
"""

import argparse
import importlib
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# name -> (module, fraction of --minutes by which the section must end)
SECTIONS = {
    "tests": ("gpu_tests", 0.3),
    "experts": ("experts", 0.5),
    "permute": ("permute", 0.53),
    "fp8": ("fp8", 0.55),
    "routing": ("routing", 0.57),
    "transfers": ("transfers", 0.61),
    "overlap": ("overlap", 0.85),
    "training": ("training", 1.0),
}
PACKAGES = ("torch", "triton", "numpy", "liger-kernel")
PLAN = """\
python3 -m benchmarks.gpu --out runs/gpu1 --minutes 9 --only tests training
python3 -m benchmarks.gpu --out runs/gpu2 --minutes 9 --only experts permute fp8 routing transfers
python3 -m benchmarks.gpu --out runs/gpu3 --minutes 9 --only overlap
python3 -m benchmarks.tune --out runs/tuned.json --shapes 16384,7168,2048,32,8
python3 -m benchmarks.gpu --out runs/gpu5 --minutes 9 --only training --training-steps 1000
"""
"""In the order of what they are worth. Each takes less than ten minutes, and needs none of the others."""
GRACE = 20.0  # seconds beyond its deadline after which a section is ended


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, help="output folder")
    add("--plan", action="store_true", help="print the commands for half an hour on a GPU, the most important first")
    add("--minutes", type=float, default=8.0, help="time limit; work that does not fit is skipped (default: 8)")
    add("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="sections to run (default: all)")
    add("--contestants", nargs="+", help="implementations in the experts section, by name or as module:function")
    add("--training-steps", type=int, default=20, help="steps of each training run (default: 20)")
    add("--smoke", action="store_true", help="use a CPU, tiny shapes and Triton's interpreter")
    add("--section", choices=SECTIONS, help=argparse.SUPPRESS)  # the process of one section
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    if options.plan:
        print(PLAN, end="")
        return 0
    if options.smoke:  # Triton reads this when kernels are imported, so set it before the imports below
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    import torch

    from .context import Context
    from .implementations import OURS, find_implementation

    names = tuple(options.contestants or OURS)
    try:
        if options.out is None:
            raise ValueError("missing --out, a folder for the results")
        if not 0 < options.minutes < math.inf:
            raise ValueError(f"--minutes must be a positive number: got {options.minutes:g}")
        if options.training_steps < 1:
            raise ValueError(f"--training-steps must be at least 1: got {options.training_steps}")
        for name in names:
            find_implementation(name)
        if not options.smoke and not torch.cuda.is_available():
            raise ValueError("no GPU found: use --smoke to try the suite on a CPU")
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"benchmarks.gpu: error: {error}\n")
        return 2
    context = Context(
        torch.device("cpu" if options.smoke else "cuda"), options.smoke, options.out.resolve(), names,
        options.training_steps,
    )  # fmt: skip
    if options.section:
        run_section(context, options.section, 60 * options.minutes)
        return 0
    context.results["about"] = environment(context)
    context.save()
    run_sections(context, options, arguments)
    print(f"\nwritten to {context.out}")
    return exit_code(context.results)


def run_sections(context: Any, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Run the selected sections in order, each in its process. One that fails does not end the others."""
    start, total = time.monotonic(), 60 * options.minutes
    selected = [name for name in SECTIONS if name in options.only]
    for name in selected:
        # The last selected section may use all remaining time.
        begin = time.monotonic()
        left = start + total * (1.0 if name == selected[-1] else SECTIONS[name][1]) - begin
        print(f"\n{name}: {left:.0f} s left", flush=True)
        if left < 5:
            found = {"status": "skipped", "reason": f"--minutes {options.minutes:g} was used up"}
        else:
            limit = ["--section", name, "--minutes", str(left / 60)]
            try:
                code = subprocess.run(
                    [sys.executable, "-m", "benchmarks.gpu", *arguments, *limit], timeout=left + GRACE
                )
                reason = f"the process ended with code {code.returncode}"
            except subprocess.TimeoutExpired:
                reason = f"stopped after {left + GRACE:.0f} s"
            context.load()
            found = context.results["sections"].get(name, {"status": "failed", "reason": reason})
        if found["reason"]:
            context.log(f"{found['status']}: {found['reason']}")
        context.results["sections"][name] = found | {"wall_seconds": round(time.monotonic() - begin, 1)}
        context.save(with_table=True)


def run_section(context: Any, name: str, seconds: float) -> None:
    """Run one section, and add its status to the results."""
    from . import stand_ins
    from .measure import error_summary

    stand_ins.provide()
    context.load()
    context.section, context.deadline = name, time.monotonic() + seconds
    found = {"status": "done", "reason": ""}
    try:
        importlib.import_module(f".{SECTIONS[name][0]}", __package__).run(context)
    except Exception as error:
        found = {"status": "failed", "reason": error_summary(error)}
    context.results["sections"][name] = found
    context.save()


def environment(context: Any) -> dict[str, Any]:
    """Return what the results depend on besides the code."""
    import torch

    from moe_dualpipe.kernels.gpu.configs import user_table_path

    found = [f"{one.name} {one.version}" for one in importlib.metadata.distributions() if one.name in PACKAGES]
    return {
        "device": "a CPU, with tiny shapes: timings are meaningless" if context.smoke else torch.cuda.get_device_name(),
        "cuda": torch.version.cuda, "python": platform.python_version(), "versions": ", ".join(found),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "kernel table": "tuned here, then the shipped table" if user_table_path().exists() else "the shipped table",
        "random data": "standard normal, exact in bf16; experts drawn uniformly without replacement",
    }  # fmt: skip


def exit_code(results: dict[str, Any]) -> int:
    """Return 1 if a section failed, GPU tests among them, or if this project's operators are wrong; else 0."""
    from .implementations import OURS

    failed = any(section["status"] == "failed" for section in results["sections"].values())
    contestants = [row for row in results["rows"] if row["section"] == "experts" and row["name"] in OURS]
    wrong = any(row["status"] in ("wrong", "failed") for row in contestants)
    return int(failed or wrong)


if __name__ == "__main__":
    sys.exit(main())
