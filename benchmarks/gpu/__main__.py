"""Run all GPU tests and benchmarks in one command, within a time limit.

    python -m benchmarks.gpu --out runs/h200                         everything: 8 minutes on one GPU
    python -m benchmarks.gpu --out runs/h200 --only experts          some sections only
    python -m benchmarks.gpu --out runs/h200 --contestants triton liger my_module:my_function
    python -m benchmarks.gpu --out /tmp/smoke --smoke                try the suite without a GPU

Writes results.json after each comparison, and results.md at the end: one row for each rate, time or loss. Other
libraries are timed if they are installed and agree with fp64. Exit code 1: GPU tests or a section failed, or this
project's operators are wrong. Exit code 2: invalid options.
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

# name -> (module, fraction of --minutes by which the section must end)
SECTIONS = {
    "tests": ("gpu_tests", 0.35),
    "experts": ("experts", 0.62),
    "permute": ("permute", 0.65),
    "fp8": ("fp8", 0.66),
    "routing": ("routing", 0.68),
    "transfers": ("transfers", 0.72),
    "overlap": ("overlap", 0.8),
    "training": ("training", 1.0),
}
PACKAGES = ("torch", "triton", "numpy", "liger-kernel", "scattermoe", "sonicmoe")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="output folder")
    add("--minutes", type=float, default=8.0, help="time limit; work that does not fit is skipped (default: 8)")
    add("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="sections to run (default: all)")
    add("--contestants", nargs="+", help="implementations in the experts section, by name or as module:function")
    add("--tuning-shapes", type=int, default=2, help="number of shapes at which autotuned libraries run (default: 2)")
    add("--training-seconds", type=float, default=60.0, help="length of each training run (default: 60)")
    add("--smoke", action="store_true", help="use a CPU, tiny shapes and Triton's interpreter")
    return parser.parse_args(arguments)


def validate_options(options: argparse.Namespace) -> None:
    """Raise ValueError for values out of range."""
    for name in ("minutes", "training_seconds"):
        if not 0 < getattr(options, name) < math.inf:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be a positive number: got {getattr(options, name):g}")
    if options.tuning_shapes < 0:
        raise ValueError(f"--tuning-shapes must be at least 0: got {options.tuning_shapes}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.smoke:  # Triton reads this when kernels are imported, so set it before the imports below
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    import torch

    from .context import Context, markdown
    from .implementations import BUILT_IN, find_implementation

    names = tuple(options.contestants or BUILT_IN)
    try:
        validate_options(options)
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
        options.tuning_shapes, options.training_seconds,
    )  # fmt: skip
    context.results["about"] = environment(context)
    run_sections(context, options)
    (context.out / "results.md").write_text(markdown(context.results))
    print(f"\nwritten to {context.out}")
    return exit_code(context.results)


def run_sections(context: Any, options: argparse.Namespace) -> None:
    """Run the selected sections in order. A section that raises is reported as failed; the next one still runs."""
    from .measure import error_summary

    start, total = time.monotonic(), 60 * options.minutes
    selected = [name for name in SECTIONS if name in options.only]
    for name in selected:
        module, share = SECTIONS[name]
        # The last selected section may use all remaining time.
        context.section, context.deadline = name, start + total * (1.0 if name == selected[-1] else share)
        print(f"\n{name}: {context.seconds_left():.0f} s left", flush=True)
        section: dict[str, Any] = {"status": "done", "reason": ""}
        context.results["sections"][name] = section
        section_start = time.monotonic()
        if context.seconds_left() < 5:
            section.update(status="skipped", reason=f"--minutes {options.minutes:g} was used up")
        else:
            try:
                importlib.import_module(f".{module}", __package__).run(context)
            except Exception as error:
                section.update(status="failed", reason=error_summary(error))
        if section["reason"]:
            context.log(f"{section['status']}: {section['reason']}")
        section["wall_seconds"] = round(time.monotonic() - section_start, 1)
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
