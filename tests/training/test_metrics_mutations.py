"""metrics.jsonl of any content: an error that names the line, or records."""

import json

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
    Metrics(tmp_path, first_step=2).close()
    assert (tmp_path / FILE).read_text() == old


def test_every_wrong_value_is_refused_or_continued(tmp_path):
    read = 0
    for what, text in mutations(STEP):
        (tmp_path / FILE).write_text(f"{json.dumps(BEFORE)}\n{text}\n")
        try:
            records = read_records(tmp_path)
        except ValueError as error:
            check_message(error)
            assert f"{FILE}, line 2: " in str(error)
            continue
        assert len(records) == 2, what
        Metrics(tmp_path, first_step=2).close()  # a resumed run
        assert read_records(tmp_path)[0]["step"] == 2
        read += 1
    assert read > 50
