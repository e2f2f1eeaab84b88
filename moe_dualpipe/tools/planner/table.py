"""Tables of `moe-dualpipe plan`: what is predicted, what a step is made of, and the ranking of layouts."""

import math
import statistics
from typing import Any

from ...messages import plural, printable
from ..drawing.tables import markdown
from .layout_search import Candidate, Found, why_slower
from .prediction import Estimate
from .real_routing import ZIPF
from .segment_times import layer_factors
from .train_command import missing, train_command
from .workload import Workload, layout_text


def estimate_report(found: Estimate) -> str:
    """The prediction for one layout."""
    load, (low, high) = found.load, found.interval
    memory, transfers = found.memory, found.step.transfers * found.constant.factor
    tflops = found.flops_per_gpu / 1e12
    rows = [
        ["step time", f"{found.seconds:.3g} s ({low:.3g} to {high:.3g} s)"],
        ["tokens/s per GPU", f"{found.tokens_per_gpu:,.0f}"],
        ["model TFLOP/s per GPU", f"{tflops:.{_digits(tflops, 0)}f} ({found.utilization:.1%} of the peak)"],
        ["hidden transfers", f"{found.step.hidden:.0%} of {transfers:.3g} s" if transfers else "-"],
        ["pipeline bubble", f"{found.step.bubble:.1%}"],
        ["GPU hours for 10^12 tokens", f"{found.gpu_hours:,.0f}"],
    ]
    digits = _digits(memory.total / 1e9, 1)
    rows.append(["peak memory", f"{memory.total / 1e9:.{digits}f} of {load.device.memory_gb:.0f} GB"])
    rows += [[f"  {name}", f"{size / 1e9:.{digits}f} GB"] for name, size in memory.parts().items()]
    advice = f"\n{text}" if (text := found.memory_advice()) else ""
    runs = plural(found.constant.runs, "published configuration")
    family = f"{found.constant.family_runs} of this family" if found.constant.family_runs else "none of this family"
    return (
        f"{describe(load)}\n\n{markdown([['predicted', ''], *rows])}\n{advice}\n"
        f"9 of 10 comparable runs should be inside the interval. Constant: {found.constant.factor:.2f}\n"
        f"({runs} on this GPU, and {family})."
    )


def measured_report(predicted: Estimate, seconds: float) -> str:
    """How a measured step compares with what others reached, and what may make the difference."""
    low, high = predicted.interval
    share = predicted.seconds / seconds
    slower = share < 1
    found = predicted.differences(slower)[:3]
    lines = [
        f"Measured: {seconds:.3g} s. Predicted from the runs of others: {predicted.seconds:.3g} s ({low:.3g} to "
        f"{high:.3g} s).",
        f"You have {share:.0%} of what others reached. The constant changes from {predicted.constant.factor:.2f} to "
        f"{seconds / predicted.step.seconds:.2f}, for the numbers below.",
    ]
    if found:
        rows = [[what, f"{more:+.3g}"] for what, more in found]
        lines.append(f"The largest differences may be:\n\n{markdown([['if in your run', 'seconds'], *rows])}")
    better = [f"{what} ({more:+.3g} s)" for what, more in predicted.differences(False)[:3]] if slower else []
    return "\n".join([*lines, *([f"\nWhat would be faster: {'; '.join(better)}."] if better else [])])


def describe(load: Workload) -> str:
    """The workload, on two lines."""
    one = load.layout
    overlap = f", {'with' if load.overlaps else 'no'} overlap" if one.ep > 1 else ""
    return (
        f"{load.shape.name} on {plural(one.num_ranks, 'GPU')} ({load.device.name}): {layout_text(one)}, "
        f"{load.schedule}\n"
        f"{plural(load.num_micro_batches, 'micro-batch', 'es')} of {load.micro_batch} x {load.seq} tokens, "
        f"{load.precision}, recompute {load.recompute}{overlap}"
    )


def waterfall_table(found: Estimate) -> str:
    """What a step is made of, from the ideal to the predicted time."""
    rows, total = [["what", "seconds", "until here", "share of the peak"]], 0.0
    ideal, digits = next(iter(found.waterfall()))[1], _digits(found.seconds, 3)
    for name, seconds in found.waterfall():
        total += seconds
        sign = "+" if rows[1:] else ""
        rows.append([name, f"{seconds:{sign}.{digits}f}", f"{total:.{digits}f}", f"{ideal / total:.1%}"])
    return markdown(rows)


def _digits(total: float, least: int) -> int:
    """Decimals for three significant digits, but not fewer than `least`. Example: 4 for 0.0199."""
    return max(least, 2 - math.floor(math.log10(total)))


def routing_line(load: Workload) -> str:
    """How uneven the loads of the experts are taken to be, in sentences."""
    factors = [one for one, layer in zip(layer_factors(load), load.shape.layers, strict=True) if layer.experts]
    if not factors:
        return "Routing: this model has no experts."
    if load.layout.ep == 1:
        return "Routing: each GPU has all experts, so all get the same number of tokens."
    if load.loads is None and load.routing == "balanced":
        return "Routing: balanced. All ranks get the same number of tokens."
    low, mean, high = min(factors), statistics.fmean(factors), max(factors)
    ranks = f"The fullest of {plural(load.layout.ep, 'rank')} gets {mean:.2f} times the mean"
    if load.loads is None:
        return f"Routing: assumed, Zipf's law with exponent {ZIPF}. {ranks}."
    return (
        f"Routing: loads of {plural(len(load.loads.layers), 'layer')} from {printable(load.loads.source)}.\n"
        f"{ranks}, and {low:.2f} to {high:.2f} by layer."
    )


def search_report(found: Found, top: int) -> str:
    """The ranking, with the reason why each is slower than the best, and the command that runs the best."""
    heading = ["layout", "schedule", "micro-batch", "recompute", "step, s", "GB", "tokens/s/GPU", "slower because of",
               "train.py"]  # fmt: skip
    rows = [_row(found, one) for one in found.ranked[:top]]
    parts = [estimate_report(found.best), markdown([heading, *rows])]
    if len(found.ranked) > top:
        parts.append(f"and {len(found.ranked) - top} more (--top)")
    if found.best.load.overlap is None and any(one.load.layout.ep > 1 for one in found.ranked):
        parts.append(
            "Of these, only dualpipe and dualpipev hide transfers of experts behind computation.\n"
            "--overlap assumes it of all schedules, as in Megatron-LM."
        )
    parts.append(train_command(found.best.load))
    first = next((one for one in found.ranked if not missing(one.load)), found.ranked[0])
    if first is not found.ranked[0]:
        seconds = f"{first.seconds * found.best.constant.factor:.3g} s"
        parts[-1] += f". The fastest that it can run, {seconds}:\n\n{train_command(first.load)}"
    return "\n\n".join(parts)


def _row(found: Found, one: Candidate) -> list[str]:
    load, factor = one.load, found.best.constant.factor
    tokens = load.tokens / (one.seconds * factor) / load.layout.num_ranks
    return [
        layout_text(load.layout), load.schedule, str(load.micro_batch), load.recompute,
        f"{one.seconds * factor:.3g}", f"{one.memory_gb:.0f}", f"{tokens:,.0f}", why_slower(one, found.ranked[0]),
        f"no: {', '.join(lacks)}" if (lacks := missing(load)) else "yes",
    ]  # fmt: skip


def search_rows(found: Found, top: int) -> dict[str, Any]:
    """The JSON report."""
    factor = found.best.constant.factor
    return {
        "best": found.best.as_dict(),
        "tried": found.tried,
        "ranked": [
            {
                "tp": one.load.layout.tp, "pp": one.load.layout.pp, "vpp": one.load.layout.chunks or 1,
                "ep": one.load.layout.ep, "cp": one.load.layout.cp, "schedule": one.load.schedule,
                "micro_batch": one.load.micro_batch, "recompute": one.load.recompute,
                "step_time_s": one.seconds * factor, "peak_memory_gb": one.memory_gb,
                "slower_because": why_slower(one, found.ranked[0]), "train_lacks": missing(one.load),
            }
            for one in found.ranked[:top]
        ],
        "train_command": train_command(found.best.load),
    }  # fmt: skip
