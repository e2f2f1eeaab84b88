"""--eval-every and --log-every: what is recorded when, and that training does not change."""

import contextlib
import math
from types import SimpleNamespace
from typing import Any

from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.training.console import Console
from moe_dualpipe.training.metrics import merged
from tests.support.runs import losses, records, settings


def test_an_interval_has_sums_rates_the_latest_values_and_means_of_finite_values():
    steps = [
        {"step": 4, "loss": 3.0, "seconds": 1.0, "tokens": 8, "tokens_per_s": 8.0, "lr": 0.1, "dead_experts": 0.5},
        {"step": 5, "loss": math.nan, "seconds": 1.0, "tokens": 8, "tokens_per_s": 8.0, "lr": 0.2, "dead_experts": 0.0},
        {"step": 6, "loss": 1.0, "seconds": 2.0, "tokens": 8, "tokens_per_s": 4.0, "lr": 0.3, "dead_experts": 0.25},
    ]
    assert merged(steps) == {
        "step": 6, "loss": 2.0, "seconds": 4.0, "tokens": 24, "tokens_per_s": 6.0, "lr": 0.3, "dead_experts": 0.25,
    }  # fmt: skip
    assert merged(steps[:1]) is steps[0]
    assert math.isnan(merged([steps[1]] * 2)["loss"])


def test_records_end_at_multiples_of_log_every_and_at_the_end(tmp_path):
    config = settings(tmp_path, log_every=3, steps=7)
    run: Any = SimpleNamespace(config=config, layout=Layout(), folder=tmp_path, first_step=0)
    with contextlib.closing(Console(run, verbose=False)) as console:
        for step in range(1, 8):
            console.step({"step": step, "loss": float(step), "tokens": 5, "tokens_per_s": 1.0, "seconds": 5.0})
    assert losses(records(tmp_path)) == {3: 2.0, 6: 5.0, 7: 7.0}
    assert losses(records(tmp_path), "tokens") == {3: 15, 6: 15, 7: 5}
