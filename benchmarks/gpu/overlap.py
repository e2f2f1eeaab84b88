"""Section "overlap": how much communication of a 64-rank job is hidden, measured on one GPU over a modeled link.

Each run profiles a pair of chunks, sequential and overlapped. In the first run, transfers take as long as in DeepSeek's
published training trace: 4 layers of DeepSeek-V3, experts over 64 ranks, 4,096 tokens, balanced routing. Computation is
this project's.
"""

from typing import Any

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
REPLAY_RUN = next(iter(RUNS))
DEEPSEEK_TRACE = {"window_us": 129_012, "compute_us": 124_338, "comm_us": 113_440, "hidden_fraction": 109_263 / 113_440}
"""What `moe-dualpipe profile analyze` reports for DeepSeek's trace: four layers on an H800."""
KEYS = (
    "window_us", "compute_us", "comm_us", "exposed_comm_us", "idle_us", "hidden_fraction", "comm_blocks", "num_sms",
    "account", "verdicts",
)  # fmt: skip
MIN_SECONDS_PER_RUN = 45.0


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["runs"]: by name, the sequential and overlapped measurements and the lower bound."""
    preset, layers, ranks, length = ("tiny", 1, 4, 16) if context.smoke else ("deepseek-v3", 4, 64, 4096)
    record.update(preset=preset, runs={})
    for name, (mode, replay) in RUNS.items():
        if context.seconds_left() < MIN_SECONDS_PER_RUN and not context.smoke:
            record["runs"][name] = {"status": "skipped", "reason": f"skipped, {context.seconds_left():.0f} s were left"}
            continue
        out = context.out / "overlap" / name.replace(",", "").replace("/", " a ").replace(" ", "-")
        out.mkdir(parents=True, exist_ok=True)
        tokens = 16 if context.smoke else 128 if mode == "decode" else length
        work = PairWorkload.from_preset(mode, preset, layers, length, tokens, device=context.device)
        found = measure(work, out, ranks, replay=replay, rounds=1 if context.smoke else 3).as_object()
        orders = {order: {key: found[order][key] for key in KEYS} for order in ("sequential", "overlapped")}
        record["runs"][name] = {"status": "timed", "link": found["link"], "bound_us": found["bound_us"], **orders}
        pair = orders["overlapped"]
        context.log(f"  {name}: {pair['hidden_fraction']:.1%} hidden, {pair['window_us'] / 1e3:.1f} ms")
        context.save()
