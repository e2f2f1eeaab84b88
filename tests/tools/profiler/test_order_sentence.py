"""The profiler names the order of weight gradients that is faster for the recorded times, if it is clearly faster."""

import pytest

from moe_dualpipe.overlap.pair_time import LayerSeconds, pair_seconds
from moe_dualpipe.tools.profiler.analyze import Analysis, Phase
from moe_dualpipe.tools.profiler.reports.overlap import order_sentence

SEGMENTS = (
    "attn(F)", "mlp(F)", "attn(B)", "mlp(B)", "attn(W)", "mlp(W)", "dispatch(F)", "combine(F)", "combine(B)",
    "dispatch(B)",
)  # fmt: skip
LONG_DISPATCH = 1, 6, 3, 2, 7, 11, 13, 5, 5, 2
LONG_COMBINE = 2, 8, 3, 9, 1, 8, 6, 14, 8, 8


def analysis(times, without=()):
    """Six layers with these segments."""
    rows = [(name, 600 * time) for name, time in zip(SEGMENTS, times, strict=True) if name not in without]
    phases = [
        Phase(name, 6, *((0, us) if "dispatch" in name or "combine" in name else (us, 0)), 0, 0) for name, us in rows
    ]
    return Analysis("0", (), 0, 0, 0, None, None, "", 0, tuple(phases))


@pytest.mark.parametrize("times", [LONG_DISPATCH, LONG_COMBINE, (1,) * 10, (3, 1, 3, 1, 1, 4, 5, 9, 2, 6)], ids=str)
def test_the_faster_order_is_named_with_what_it_saves(times):
    layers = [LayerSeconds(*times)] * 4
    saved = 1 - pair_seconds(layers, layers, late=True) / pair_seconds(layers, layers)
    sentence = order_sentence(analysis(times))
    assert bool(sentence) == (saved >= 0.02)
    if sentence:
        assert f"takes {saved:.1%} less" in sentence and "parallel.wgrad=late" in sentence


def test_some_times_favor_one_order_and_some_the_other():
    assert order_sentence(analysis(LONG_COMBINE)) and not order_sentence(analysis(LONG_DISPATCH))
    assert not order_sentence(analysis(LONG_COMBINE, without=("mlp(W)",)))
