"""metrics.jsonl of any content: an error that names the line, or curves and a summary."""

import json

import pytest

from moe_dualpipe.tools.drawing.curves import positions, run_summary, save_curves
from moe_dualpipe.training.metrics import FILE, Metrics, read_records
from tests.support.mutations import check_message, mutations

STEP = {
    "step": 3, "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "skipped": 0, "seconds": 0.5, "tokens": 64,
    "tokens_per_s": 128.0, "mfu": 0.25, "validation_loss": 3.0,
}  # fmt: skip
BEFORE = {**STEP, "step": 2}


def test_numbers_that_are_not_finite_are_null_in_the_file_and_none_when_read(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.write(step=1, loss=float("nan"), grad_norm=float("inf"))
    metrics.close()
    line = '{"step": 1, "loss": null, "grad_norm": null}\n'
    assert (tmp_path / FILE).read_text() == line
    old = '{"step": 2, "loss": NaN, "grad_norm": -Infinity, "tokens": 1, "seconds": 1, "tokens_per_s": 1}\n'
    (tmp_path / FILE).write_text(old)
    (record,) = read_records(tmp_path)
    assert (record["loss"], record["grad_norm"]) == (None, None)
    assert run_summary("a", [record]) == "a: step 2, loss not finite, 1 tokens/s (median)"
    Metrics(tmp_path, first_step=2).close()
    assert (tmp_path / FILE).read_text() == old


def test_every_wrong_value_is_refused_or_drawn(tmp_path):
    drawn = []
    for what, text in mutations(STEP):
        (tmp_path / FILE).write_text(f"{json.dumps(BEFORE)}\n{text}\n")
        try:
            records = read_records(tmp_path)
        except ValueError as error:
            check_message(error)
            assert f"{FILE}, line 2: " in str(error)
            continue
        assert run_summary(what, records).startswith(what)
        for along in ("step", "tokens", "hours"):
            assert len(positions(records, along)) <= 2
        drawn.append(records)
    assert 50 < len(drawn) < 150
    save_curves({str(i): records for i, records in enumerate(drawn[::7])}, tmp_path / "curves.svg", "tokens")


@pytest.mark.parametrize("missing", ["tokens", "seconds", "tokens_per_s"])
def test_a_step_without_its_speed_is_refused(tmp_path, missing):
    (tmp_path / FILE).write_text(json.dumps({key: value for key, value in STEP.items() if key != missing}) + "\n")
    with pytest.raises(ValueError, match=rf"line 1: a step without valid {missing}: '.*…$"):
        read_records(tmp_path)
