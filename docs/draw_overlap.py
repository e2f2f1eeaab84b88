"""Draw docs/images/overlap.png: a measured pair of chunks, one after the other and interleaved, on two lanes.

    PYTHONPATH=. python docs/draw_overlap.py

Measured here and now: one process as one of 16 ranks, over a modelled link that is busy 0.7 of the computing time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch

from benchmarks.overlap import CPU, LENGTH, MODEL, RANKS, SEQUENCES
from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.expert_parallel.link import Due
from moe_dualpipe.models import TransformerStage, build_model, next_token_loss
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.engine import Lane
from moe_dualpipe.schedule.render import COLOURS

OUT = Path(__file__).parent / "images" / "overlap.png"
SHARE, WAIT = 0.7, "wait for "

Span = tuple[str, float, float]  # label, start, end


class Interleaved(Engine):
    """Writes down when each segment computed, and when one waited."""

    title = "interleaved"

    def __init__(self) -> None:
        super().__init__(CPU)
        self.spans: list[Span] = []
        self.current, self._since = "", 0.0

    @contextmanager
    def label(self, text: str, layer: int | None, log: bool = True) -> Iterator[None]:
        outer = self.current
        self._turn_to(text)
        try:
            with super().label(text, layer, log):
                yield
        finally:
            self._turn_to(outer)

    def _turn_to(self, text: str) -> None:
        now = time.perf_counter()
        if self.current:
            self.spans.append((self.current, self._since, now))
        self.current, self._since = text, now


class Sequential(Interleaved):
    """Runs the forward, then the backward with its weight gradients."""

    title = "one after the other"

    def interleave(self, first: Lane, second: Lane) -> None:
        second.weight_grads = None
        for lane in (first, second):
            while lane.active:
                lane.advance()
                lane.launch()


def main() -> None:
    torch.set_num_threads(1)
    ep = Loopback(MODEL.num_experts, RANKS)
    model = build_model(replace(MODEL, num_layers=2), ep)
    x, y = torch.randint(MODEL.vocab_size, (2, SEQUENCES, LENGTH))
    carry = ep.wire.carry

    def run(engine: Interleaved, link: Link) -> tuple[list[Span], list[Span]]:
        """What computed when, and what travelled when."""
        transfers: list[Span] = []

        def watched(seconds: float) -> Due:
            due = carry(seconds)
            if seconds:
                transfers.append((engine.current, ep.wire._free_at - seconds, ep.wire._free_at))
            return due

        ep.link, ep.wire.carry = Link(), carry
        loss = next_token_loss(model(x), x)
        ep.link, ep.wire.carry = link, watched  # type: ignore[method-assign]
        TransformerStage.overlapped_forward_backward(
            model, [y], next_token_loss, [y], model, loss, None, None, engine=engine
        )
        arrived = {name: [t for t in transfers if t[0] == name] for name, _, _ in transfers}
        spans = []
        for text, a, b in engine.spans:
            if text.startswith(WAIT):  # until the rows are there; then they are unpacked and added up
                a, text = max(a, arrived[text.removeprefix(WAIT)].pop(0)[2]) if transfers else a, WAIT
            spans.append((text, a, b))
        return spans, transfers

    def total(spans: list[Span]) -> float:
        return sum(end - start for _, start, end in spans)

    for _ in range(3):
        computing = total(run(Interleaved(), Link())[0])
    link = Link(gb_per_s=total(run(Interleaved(), Link(gb_per_s=1.0))[1]) / (SHARE * computing))

    figure, axes = plt.subplots(2, 1, figsize=(13, 4.2), sharex=True)
    for axis, engine in zip(axes, (Sequential(), Interleaved()), strict=True):
        lanes = run(engine, link)
        start, end = lanes[0][0][1], lanes[0][-1][2]
        for row, spans in zip((1, 0), lanes, strict=True):
            for text, a, b in spans:
                left, width = 1e3 * (a - start), 1e3 * (b - a)
                if width <= 0:
                    continue
                axis.barh(
                    row,
                    width,
                    left=left,
                    height=0.8,
                    color=COLOURS.get(text[-2], "#c8c8c8"),
                    edgecolor="white",
                    linewidth=0.5,
                )
                if width > 12:
                    axis.text(left + width / 2, row, text, ha="center", va="center", fontsize=7)
        axis.set_yticks([0, 1], ["link", "compute"])
        axis.set_title(f"{engine.title}: {1e3 * (end - start):.0f} ms", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("ms, measured on one CPU core; the link is modelled. Orange: forward, green: backward, "
                       "blue: weight gradients, grey: adding up what arrived")  # fmt: skip
    figure.tight_layout()
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
