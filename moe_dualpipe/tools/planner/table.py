"""Tables of `moe-dualpipe plan` and `model`: predictions, what a step is made of, the ranking of layouts, and sizes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...messages import plural, printable
from ...models import PRESETS
from ...models.shape import ModelShape
from ...schedule import NAMES, check_numbers
from ..drawing.tables import markdown
from .layout_search import why_slower
from .prediction import Estimate, routings
from .workload import PAIRED, Workload, layout_text


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
        lines.append(
            f"The largest causes of the difference may be:\n\n{markdown([['if in your run', 'seconds'], *rows])}"
        )
    better = [f"{what} ({more:+.3g} s)" for what, more in predicted.differences(False)[:3]] if slower else []
    return "\n".join([*lines, *([f"\nWhat would be faster: {'; '.join(better)}."] if better else [])])


def describe(load: Workload) -> str:
    """The workload, on two lines."""
    one = load.layout
    overlap = f", {'with' if load.overlaps else 'no'} overlap" if one.ep > 1 else ""
    fp8 = f", {load.fp8.replace('+', ' and ')} in FP8" if load.fp8 != "off" else ""
    stages = f", layers {','.join(map(str, load.layers))}" if load.layers else ""
    return (
        f"{load.shape.name} on {plural(one.num_ranks, 'GPU')} ({load.device.name}): {layout_text(one)}, "
        f"{load.schedule}\n"
        f"{plural(load.num_micro_batches, 'micro-batch', 'es')} of {load.micro_batch} x {load.seq} tokens, "
        f"{load.precision}{fp8}, recompute {load.recompute}{overlap}{stages}"
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


def routing_report(found: Estimate) -> str:
    """How uneven the loads of the experts are assumed to be, and the step with other places and numbers of ranks."""
    load = found.load
    if load.layout.ep == 1:
        return "Routing: no expert is on another GPU."
    source = f"assumed, MaxVio {load.violation:g}"
    if load.loads is not None:
        source = f"loads of {plural(len(load.loads.layers), 'layer')} from {printable(load.loads.source)}"
    rows = [["experts", "max / mean", "step, s", "change"]]
    for row in routing_rows(found):
        change = row["step_time_s"] / found.seconds - 1
        rows.append([row["experts"], f"{row['expert_imbalance']:.2f}", f"{row['step_time_s']:.3g}", f"{change:+.1%}"])
    return f"Routing: {source}. Largest load of {plural(load.layout.ep, 'rank')}:\n\n{markdown(rows)}"


def routing_rows(found: Estimate) -> list[dict[str, Any]]:
    """The JSON report of the same."""
    ways = ((name, replace(found, load=load)) for name, load in routings(found.load))
    return [{"experts": name, "expert_imbalance": way.imbalance, "step_time_s": way.seconds} for name, way in ways]


def search_report(ranked: Sequence[Estimate], top: int) -> str:
    """The ranking, with the reason why each is slower than the fastest, and the command that runs the best.

    What train.py cannot run stands apart.
    """
    ranked = by_runnable(ranked)
    fastest = min(ranked, key=lambda one: one.seconds)
    kinds = [[one for one in ranked if not missing(one.load)], [one for one in ranked if missing(one.load)]]
    parts = [estimate_report(ranked[0])]
    for some, heading in zip(kinds, ("layout", "train.py cannot run"), strict=True):
        if some:
            columns = [heading, "schedule", "micro-batch", "recompute", "step, s", "GB", "tokens/s/GPU",
                       "slower because of", *["it lacks"] * (some is kinds[1])]  # fmt: skip
            parts.append(markdown([columns, *(_row(one, fastest) for one in some[:top])]))
        if len(some) > top:
            parts.append(f"and {len(some) - top} more (--top)")
    pipelined = any(one.load.layout.pp > 1 for one in ranked)
    tried = f"Schedules tried: {', '.join(NAMES)}." if pipelined else ""
    if ranked[0].load.overlap is None and any(one.load.layout.ep > 1 for one in ranked):
        tried += (
            f"\nOf these, {', '.join(PAIRED)} hide transfers of experts behind computation.\n"
            "--overlap assumes it of all schedules, as in Megatron-LM."
        )
    return "\n\n".join(filter(None, [*parts, tried.strip(), train_command(ranked[0].load)]))


def by_runnable(ranked: Sequence[Estimate]) -> list[Estimate]:
    """What train.py can run first."""
    return sorted(ranked, key=lambda one: bool(missing(one.load)))


def _row(one: Estimate, fastest: Estimate) -> list[str]:
    load, lacks = one.load, missing(one.load)
    return [
        layout_text(load.layout), load.schedule, str(load.micro_batch), load.recompute, f"{one.seconds:.3g}",
        f"{one.memory.total / 1e9:.0f}", f"{one.tokens_per_gpu:,.0f}", why_slower(one, fastest),
        *([", ".join(lacks)] if lacks else []),
    ]  # fmt: skip


def search_rows(ranked: Sequence[Estimate], top: int) -> dict[str, Any]:
    """The JSON report. What train.py can run comes first."""
    ranked = by_runnable(ranked)
    fastest = min(ranked, key=lambda one: one.seconds)
    return {
        "best": ranked[0].as_dict(),
        "ranked": [
            {
                "tp": one.load.layout.tp, "pp": one.load.layout.pp, "vpp": one.load.layout.chunks or 1,
                "ep": one.load.layout.ep, "cp": one.load.layout.cp, "schedule": one.load.schedule,
                "micro_batch": one.load.micro_batch, "recompute": one.load.recompute,
                "layers": one.load.layers,
                "step_time_s": one.seconds, "peak_memory_gb": one.memory.total / 1e9,
                "slower_because": why_slower(one, fastest), "train_lacks": missing(one.load),
            }
            for one in ranked[:top]
        ],
        "train_command": train_command(ranked[0].load),
    }  # fmt: skip


# ---- The command that starts a planned run with this project ----


def train_command(load: Workload) -> str:
    """The command that starts this run here, or why this project cannot run it."""
    if lacks := missing(load):
        return f"train.py cannot run it: {', '.join(lacks)}"
    one = load.layout
    # Machines have up to 8 GPUs, or 4 where a domain spans machines.
    most = min(8 if (load.device.domain.gpus or 1) <= 8 else 4, load.device.domain.gpus or 1)
    each = next(number for number in range(most, 0, -1) if one.num_ranks % number == 0)
    where = f"--nnodes {one.num_ranks // each} " * (one.num_ranks > each) + f"--nproc-per-node {each}"
    words = [
        f"torchrun {where} train.py --preset {load.shape.name} --pp {one.pp} --ep {one.ep} --schedule {load.schedule}",
        f"--batch-size {load.global_batch} --micro-batch-size {load.micro_batch} --seq-len {load.seq}",
        f"--recompute {load.recompute}",
    ]
    others = {
        f"parallel.num_chunks={one.chunks}": one.chunks is not None,
        f"parallel.layers={','.join(map(str, load.layers))}": bool(load.layers),
        f"model.mtp_layers={load.shape.mtp}": load.shape.mtp != PRESETS[load.shape.name].mtp_layers,
        "parallel.overlap=false": load.overlap is False and load.schedule in PAIRED,
        "parallel.zero=false": not load.zero,
        f"compute.fp8={load.fp8}": load.fp8 != "off",
        "compute.fp8_recipe=mxfp8": load.fp8 != "off" and load.expert_precision == "mxfp8",
    }
    changed = [word for word, differs in others.items() if differs]
    return " ".join(word for word in [*words, *["--set"] * bool(changed), *changed] if word)


def missing(load: Workload) -> list[str]:
    """What train.py lacks for this run. Empty if it can run it."""
    one = load.layout
    found = [f"tp {one.tp}"] if one.tp > 1 else []
    found += [load.precision] if load.precision in ("fp8", "mxfp8") else []
    found += [f"overlap in {load.schedule}"] if load.overlap and one.ep > 1 and load.schedule not in PAIRED else []
    found += [] if load.shape.name in PRESETS else [f"{load.shape.name} is not a preset"]
    try:
        check_numbers(load.schedule, one.pp, load.num_micro_batches, one.chunks)
    except ValueError as error:
        found.append(str(error))
    return found


# ---- Sizes of models ----


def sizes_table(shapes: Sequence[ModelShape]) -> str:
    """Return a table with one row per model."""
    rows = [["preset", "layers", "experts", "per token", "shared", "vocabulary", "parameters", "active"]]
    for shape in shapes:
        counts = format_count(shape.parameters), format_count(shape.active_parameters)
        rows.append([shape.name, str(len(shape.layers)), *map(str, _experts(shape)), f"{shape.vocab:,}", *counts])
    return markdown(rows)


def _experts(shape: ModelShape) -> tuple[int, int, int]:
    """Experts of a layer, those of a token, and shared ones."""
    last = shape.layers[-1]
    return last.experts, last.top_k, last.shared_size // max(1, last.expert_size)


def size_summary(shape: ModelShape, seq_len: int) -> str:
    """Return layers, experts, parameters and FLOPs of one model in sentences."""
    active, forward = shape.active_parameters, shape.forward_flops(seq_len)
    experts, top_k, shared = _experts(shape)
    dense = sum(not layer.experts for layer in shape.layers)
    return (
        f"{shape.name}: {len(shape.layers)} layers, {dense} of them dense; {experts} experts, "
        f"{top_k} per token, and {shared} shared\n"
        f"{format_count(shape.parameters)} parameters, {format_count(active)} active "
        f"({format_count(active - shape.embedding)} without the embedding, which is only looked up)\n"
        f"FLOPs per token at {seq_len:,} tokens: {forward / 1e9:,.2f} G forward, "
        f"{shape.score_flops(seq_len) / forward:.0%} of it causal attention; "
        f"{shape.train_flops(seq_len) / 1e9:,.2f} G in training"
    )


def format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"
