"""Section "overlap": how much communication of a 64-rank job is hidden, measured on one GPU over a modeled link.

Each run profiles a pair of chunks, sequential and overlapped. In the first two, transfers take as long as in DeepSeek's
published training trace: 4 layers of DeepSeek-V3, experts over 64 ranks, 4,096 tokens, balanced routing. Computation is
this project's. Products leave 20 multiprocessors to transfers, as in training; in the second run, they may use all.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from moe_dualpipe.tools.profiler.measure import measure
from moe_dualpipe.tools.profiler.pair import Mode, PairWorkload

from .context import Context

# name -> (mode, whether transfers take the times in DeepSeek's trace, whether products may use all multiprocessors)
RUNS: dict[str, tuple[Mode, bool, bool]] = {
    "train, DeepSeek's transfers": ("train", True, False),
    "train, DeepSeek's transfers, all SMs": ("train", True, True),
    "train, 400 Gb/s": ("train", False, False),
    "prefill, 400 Gb/s": ("prefill", False, False),
    "decode, 400 Gb/s": ("decode", False, False),
}
MIN_SECONDS_PER_RUN = 45.0


def run(context: Context) -> None:
    """Add the times of each pair, and the share of its communication that is hidden. Keeps the first recordings."""
    preset, layers, ranks, length = ("tiny", 1, 4, 16) if context.smoke else ("deepseek-v3", 4, 64, 4096)
    for name, (mode, replay, all_sms) in RUNS.items():
        what = f"{preset}, {name}"
        if context.seconds_left() < MIN_SECONDS_PER_RUN and not context.smoke:
            context.add(what, "pair", status="skipped", reason=f"{context.seconds_left():.0f} s were left")
            continue
        tokens = 16 if context.smoke else 128 if mode == "decode" else length
        work = PairWorkload.from_preset(mode, preset, layers, length, tokens, device=context.device)
        work = replace(work, num_sms=None) if all_sms else work
        with TemporaryDirectory(dir=context.out) as folder:
            found = measure(work, Path(folder), ranks, replay=replay, rounds=1 if context.smoke else 3).as_object()
            if name == next(iter(RUNS)):
                for recording in Path(folder).iterdir():
                    recording.replace(context.out / recording.name)
        context.results.setdefault("pairs", {})[what] = found
        for order in ("sequential", "overlapped"):
            context.add(what, order, "window", median=found[order]["window_us"], unit="us")
        pair = found["overlapped"]
        for phase in ("compute", "comm"):
            context.add(what, "overlapped", phase, median=pair[f"{phase}_us"], unit="us")
        context.add(what, "lower bound", "window", median=found["bound_us"], unit="us")
        if (hidden := pair["hidden_fraction"]) is None:
            context.add(what, "overlapped", "hidden", status="unknown", reason="no communication was recorded")
        else:
            context.add(what, "overlapped", "hidden", median=100 * hidden, unit="% of the communication")
        context.save()
