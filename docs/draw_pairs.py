"""Draw docs/images/pairs/*.png: two layers of a pair of micro-batches in training, with keys, prefill and decoding.

    PYTHONPATH=. python docs/draw_pairs.py

The engine runs a small model and tells the order in which it queues work. Two clocks, one for computation and one for
the link, place the boxes: a transfer starts when its data exists and the link is free.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from draw_idea import BACKWARD, COMMUNICATION, FORWARD, WEIGHT, draw_box

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.expert_parallel.labels import is_exchange
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.labels import letter_of
from moe_dualpipe.tools.drawing.figures import new_figure, save_figure
from moe_dualpipe.tools.drawing.timeline import paler
from moe_dualpipe.tools.profiler.pair import Mode, Pair, PairWorkload
from tests.support.engines import run_on

OUT = Path(__file__).parent / "images" / "pairs"
TRAINING = {
    "attn(F)": 4.36, "mlp(F)": 4.60, "attn(B)": 9.34, "mlp(B)": 5.31, "attn(W)": 2.39, "mlp(W)": 6.38,
    "dispatch(F)": 6.69, "combine(F)": 8.68, "dispatch(B)": 7.49, "combine(B)": 5.50,
}  # fmt: skip
"""Milliseconds per layer in DeepSeek's training profile (github.com/deepseek-ai/profile-data)."""
SCHEMATIC = {"attn(F)": 5.0, "mlp(F)": 4.0, "dispatch(F)": 3.5, "combine(F)": 4.5}
KEYS = TRAINING | {
    "qkv(F)": 3.2, "attn(F)": 7.5, "qkv(B)": 3.2, "attn(B)": 15.0, "qkv(W)": 3.2, "attn(W)": 3.2, "keys(F)": 3.2,
    "keys(B)": 3.2,
}  # fmt: skip
"""Schematic, of longer sequences on several context-parallel ranks."""
PICTURES: tuple[tuple[str, Mode, int, dict[str, float], str], ...] = (
    ("training", "train", 1, TRAINING, "all-to-all"), ("keys", "train", 2, KEYS, "all-to-all\nand keys"),
    ("prefill", "prefill", 1, SCHEMATIC, "all-to-all"), ("decode", "decode", 1, SCHEMATIC, "all-to-all,\nno SM"),
)  # fmt: skip


class Box(NamedTuple):
    """A segment of a micro-batch, 0 or 1."""

    label: str
    micro_batch: int
    start: float
    end: float


def order(mode: Mode, cp: int) -> list[tuple[str, int]]:
    """The labels that the engine queues for two layers, each with its micro-batch."""
    workload = PairWorkload.from_preset(mode, "tiny", 2, 16, 16, cp=cp)
    workload = replace(workload, model=replace(workload.model, num_shared_experts=0))
    pair, log = Pair(workload, Loopback(8, 8)), list[str]()
    pair.prepare()
    with run_on(Engine(torch.device("cpu"), queued=True, log=log)):
        pair.overlapped()
    seen = Counter[str]()
    found = []
    for label in log:
        # Two forwards have the same labels, in turn.
        found.append((label, seen[label] % 2 if mode != "train" else int(letter_of(label) != "F")))
        seen[label] += 1
    return found


def boxes(queued: list[tuple[str, int]], lengths: dict[str, float]) -> Iterator[Box]:
    """Place the segments: each after those before it in its micro-batch, and on the link or among the computation."""
    free, reached = {True: 0.0, False: 0.0}, [0.0, 0.0]
    for label, micro_batch in queued:
        if label not in lengths:  # the sum at the end of a stage, which takes no time
            continue
        on_link = is_transfer(label)
        weights = letter_of(label) == "W"
        start = max(free[on_link], 0.0 if weights else reached[micro_batch])
        free[on_link] = end = start + lengths[label]
        if not weights:
            reached[micro_batch] = end
        yield Box(label, micro_batch, start, end)


def is_transfer(label: str) -> bool:
    return is_exchange(label) or label.startswith("keys(")


def main() -> None:
    OUT.mkdir(exist_ok=True)
    colors = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT}
    for name, mode, cp, lengths, link in PICTURES:
        figure = new_figure(8, 1.25)
        axes = figure.add_subplot()
        for box in boxes(order(mode, cp), lengths):
            on_link, letter = is_transfer(box.label), letter_of(box.label) or ""
            color = COMMUNICATION if on_link else colors[letter]
            if mode != "train":
                letter, color = str(box.micro_batch), paler(color, 0.5) if box.micro_batch else color
            text = f"{box.label.partition('(')[0]}\n({letter})"
            draw_box(axes, text, box.start, box.end - box.start, -1 if on_link else 0, color)
        axes.set_yticks([0, -1], ["compute", link], fontsize=8)
        axes.set_xticks([])
        axes.set_frame_on(False)
        axes.tick_params(length=0)
        axes.margins(0.005)
        save_figure(figure, OUT / f"{name}.png")
        print(OUT / f"{name}.png")


if __name__ == "__main__":
    main()
