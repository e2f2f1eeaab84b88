"""The losses in FP8: means over seeds, differences from bf16 with the same seed, and the curves."""

import pytest

from benchmarks.fp8_loss import CASES, POINTS, Losses, draw, rows


def test_a_recipe_is_compared_with_bf16_of_the_same_seed():
    found = {
        "bf16": [Losses([9.0] * 18 + [2.0, 2.0], 4.0), Losses([9.0] * 18 + [4.0, 4.0], 8.0)],
        "ue8m0": [Losses([9.0] * 18 + [2.0, 2.2], 4.0), Losses([9.0] * 18 + [4.0, 4.0], 7.6)],
    }
    first, second = rows(found)
    assert first == ["bf16", "3.0000", "2.0000 to 4.0000", "-", "6.0000", "4.0000 to 8.0000", "-"]
    assert second[3] == "+2.50% (+0.00 to +5.00)" and second[6] == "-2.50% (-5.00 to +0.00)"


@pytest.mark.parametrize("steps", [1, 23, 24, 25, 600])
def test_a_curve_has_the_mean_of_all_steps(steps):
    losses = Losses([float(step) for step in range(steps)], 0.0)
    curve, size = losses.curve(), -(-steps // POINTS)
    last = steps % size or size
    assert len(curve) <= POINTS
    assert sum(curve[:-1]) * size + curve[-1] * last == pytest.approx(sum(range(steps)))


def test_the_figure_has_a_line_and_a_band_for_each_case(tmp_path):
    pytest.importorskip("matplotlib")
    draw({case: [Losses([2.0, 1.0], 1.0), Losses([3.0, 1.0], 1.0)] for case in CASES}, tmp_path / "losses.svg")
    text = (tmp_path / "losses.svg").read_text()
    assert all(f">{case}<" in text for case in CASES) and text.count("FillBetween") == len(CASES)
