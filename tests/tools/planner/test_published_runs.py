"""The planner against published training runs, with each family of models left out of the fit.

The rows lie outside of this repository; without them, the tests that need them are skipped.
"""

import json
import math
import statistics

import pytest

from benchmarks.planner.__main__ import CALIBRATION, OWN, report
from benchmarks.planner.fit import Point, fit, predict, score, validate
from benchmarks.planner.ratios import pairs, ratio_errors
from benchmarks.planner.rows import Row, read_rows
from moe_dualpipe.tools.planner.constants import find_constant, read_constants
from moe_dualpipe.tools.planner.prediction import estimate

published = pytest.mark.skipif(not CALIBRATION.is_file(), reason=f"{CALIBRATION.name} is not there")


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return predict(read_rows([CALIBRATION]))


@published
def test_families_that_were_left_out_are_predicted(points):
    scores = score(points)
    assert len(scores) == len(points) >= 60
    families = {one.point.row.family for one in scores}
    assert families == {"deepseek", "gpt", "llama", "megascale", "mixtral", "qwen3"}
    assert statistics.median(abs(one.error) for one in scores) <= 0.15
    of_family = [statistics.median(abs(s.error) for s in scores if s.point.row.family == name) for name in families]
    assert statistics.median(of_family) <= 0.15
    assert statistics.fmean(one.inside for one in scores) >= 0.8
    # A constant number of TFLOP/s for all GPUs of a kind errs by twice as much.
    flops = [p.row.load.tokens * p.row.load.shape.train_flops(p.row.load.seq) for p in points]
    rates = [f / p.row.seconds / p.row.load.layout.num_ranks for f, p in zip(flops, points, strict=True)]
    constant = statistics.median(rates)
    assert statistics.median(abs(rate / constant - 1) for rate in rates) > 0.25


@published
def test_ratios_are_within_five_points(points):
    found = list(pairs(points))
    assert {what for what, *_ in found} >= {"overlap", "zb1p -> 1f1b", "1f1b -> interleaved_1f1b"}
    for what, point, measured, predicted in found:
        assert abs(predicted - measured) < 0.05, (what, point.row.name)
    assert ratio_errors(points).endswith("points")


@published
def test_deepseek_v3_took_180_000_gpu_hours_for_a_trillion_tokens(points):
    (row,) = (point.row for point in points if point.row.software == "deepseek")
    assert estimate(row.load, row.software).gpu_hours == pytest.approx(180_000, rel=0.1)


@published
def test_the_constants_are_those_of_the_fit(points):
    assert json.loads(json.dumps(fit(points))) == read_constants()


def test_rows_of_this_repository_are_read_and_validated():
    rows = read_rows([OWN / "modelzoo.json"])
    assert len(rows) >= 10
    text = report(validate(predict(rows), read_constants()))
    assert "median absolute error" in text and "qwen3" in text


# ---- The fit, on made-up rows ----


def made_up(name, gpu, software, log_ratio, predicted=10.0):
    (row, *_) = read_rows([OWN / "modelzoo.json"])
    shape = type(row.load.shape)(name, 8, 8, row.load.shape.layers)
    device = type(row.load.device)(
        **{f: getattr(row.load.device, f) for f in row.load.device.__slots__} | {"name": gpu}
    )
    load = type(row.load)(**{**row.load.__dict__, "shape": shape, "device": device, "precision": "bf16"})
    record = {"metric": "step_time_s", "value": predicted * math.exp(log_ratio)}
    return Point(Row(record, load, software), predicted)


def test_a_constant_of_many_families_is_their_mean_and_of_one_is_drawn_to_all():
    many = [made_up(name, "h100", "a", 0.3) for name in ("llama", "qwen3", "mixtral", "deepseek")]
    many += [made_up("nemotron", "h800", "c", -0.2)]
    one = [made_up("gpt-1b", "a100", "b", 0.9)] * 50
    known = fit(many + one)
    of_many, of_one = find_constant("h100", "bf16", "a", known), find_constant("a100", "bf16", "b", known)
    assert math.log(of_many.factor) == pytest.approx(0.3) and of_many.rows == 4
    assert 0.3 < math.log(of_one.factor) == pytest.approx((0.9 + 0.3) / 2) and of_one.rows == 50
    unknown = find_constant("b200", "bf16", known=known)
    assert math.log(unknown.factor) == pytest.approx(0.3) and unknown.rows == 0
    spreads = [one.high / one.low for one in (of_many, of_one, unknown)]
    assert spreads == sorted(spreads) and spreads[0] < spreads[1] < spreads[2]


def test_the_interval_reaches_further_to_the_side_of_the_surprises():
    """Eight families agree. If a ninth is much slower, a tenth may be, too."""
    usual = [made_up(f"family-{i}", "h100", "a", 0.01 * i) for i in range(8)]
    slow = fit([*usual, made_up("other", "h100", "a", 0.8)])
    fast = fit([*usual, made_up("other", "h100", "a", -0.8)])
    assert slow["slow"] > 2 * slow["fast"] and fast["slow"] == fast["fast"]


def test_a_family_is_predicted_without_its_own_rows():
    points = [
        made_up("llama", "h100", "a", 0.2),
        made_up("qwen3", "h100", "a", 0.2),
        made_up("gpt-1b", "h100", "a", 1.0),
    ]
    errors = {one.point.row.family: one.error for one in score(points)}
    assert errors["gpt"] == pytest.approx(math.exp(0.2 - 1.0) - 1)  # knows only the 0.2 of the others
    assert errors["llama"] > 0.1  # drawn upwards by gpt
