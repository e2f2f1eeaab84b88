"""Section "overlap": how much communication of a 64-rank job is hidden, measured on one GPU over a modeled link.

Each run profiles a pair of chunks, sequential and overlapped. In the first run, transfers take as long as in DeepSeek's
published training trace: 4 layers of DeepSeek-V3, experts over 64 ranks, 4,096 tokens, balanced routing. Computation is
this project's.
"""

import json

from moe_dualpipe.tools.profiler.measure import measure
from moe_dualpipe.tools.profiler.pair import Mode, PairWorkload

from .context import Context

# name -> (mode, whether transfers take the times in DeepSeek's trace)
RUNS: dict[str, tuple[Mode, bool]] = {
    "train, DeepSeek's transfers": ("train", True),
    "train, 400 Gb/s": ("train", False),
    "prefill, 400 Gb/s": ("prefill", False),
    "decode, 400 Gb/s": ("decode", False),
}
MIN_SECONDS_PER_RUN = 45.0


def run(context: Context) -> None:
    """Add the times of each pair, and the share of its communication that is hidden.

    The recordings and report.json of each pair are in the folder `overlap`.
    """
    preset, layers, ranks, length = ("tiny", 1, 4, 16) if context.smoke else ("deepseek-v3", 4, 64, 4096)
    for name, (mode, replay) in RUNS.items():
        what = f"{preset}, {name}"
        if context.seconds_left() < MIN_SECONDS_PER_RUN and not context.smoke:
            context.add(what, "pair", status="skipped", reason=f"{context.seconds_left():.0f} s were left")
            continue
        out = context.out / "overlap" / name.replace(",", "").replace("/", " a ").replace(" ", "-")
        out.mkdir(parents=True, exist_ok=True)
        tokens = 16 if context.smoke else 128 if mode == "decode" else length
        work = PairWorkload.from_preset(mode, preset, layers, length, tokens, device=context.device)
        found = measure(work, out, ranks, replay=replay, rounds=1 if context.smoke else 3).as_object()
        (out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
        for order in ("sequential", "overlapped"):
            context.add(what, order, "window", median=found[order]["window_us"], unit="us")
        pair = found["overlapped"]
        for phase in ("compute", "comm"):
            context.add(what, "overlapped", phase, median=pair[f"{phase}_us"], unit="us")
        context.add(what, "lower bound", "window", median=found["bound_us"], unit="us")
        context.add(what, "overlapped", "hidden", median=100 * pair["hidden_fraction"], unit="% of the communication")
        context.save()
