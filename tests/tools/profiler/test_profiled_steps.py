"""The report of recorded steps of ranks on two hosts. The recording itself is tested in test_profiled_run.py."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dualpipe.health.heartbeat import Progress
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import build
from moe_dualpipe.tools.profiler import profiled_steps as profiling
from moe_dualpipe.tools.profiler.profiled_steps import ProfiledSteps, profiled_steps
from moe_dualpipe.training.config import MetricsConfig, TrainConfig
from moe_dualpipe.training.extensions import Update


def trainer_of(folder, profile, first_step, schedule, layout, **changes) -> Any:
    config = TrainConfig(steps=12, metrics=MetricsConfig(profile=profile))
    start = SimpleNamespace(**{"first_step": first_step, "restarted": False, **changes})
    run = SimpleNamespace(folder=folder, start=start, schedule=schedule, layout=layout, device=torch.device("cpu"))
    return SimpleNamespace(run=run, config=config, progress=Progress(), optimizer=SimpleNamespace(wait=lambda: None))


def test_steps_are_recorded_after_a_warm_up_and_a_barrier(tmp_path, monkeypatch):
    done: list[str] = []

    @contextmanager
    def capture(path, _):
        done.append(f"open {path.name}")
        yield
        done.append("close")

    monkeypatch.setattr(profiling, "capture", capture)
    monkeypatch.setattr(profiling.dist, "barrier", lambda: done.append("barrier"))
    monkeypatch.setattr(profiling.time, "time_ns", lambda: 1_700_000_000_000_000_500)
    monkeypatch.setattr(ProfiledSteps, "report", lambda _: done.append("report") or "the report")
    schedule, layout = build("1f1b", 2, 2), Layout(2, 1, 1, 1)
    trainer, notes, waiting = trainer_of(tmp_path, 2, 5, schedule, layout), {}, []
    trainer.optimizer.wait = lambda: done.append("wait")
    profiler = ProfiledSteps(trainer)
    for index in range(5, 11):
        profiler.before_step(index)
        done.append(str(index))
        update = Update(index, 0.0, 0.0, torch.zeros(1, 1))
        profiler.after_update(update)
        notes[index] = update.notes
        waiting.append(profiler.exclusive)
    begin, end = ["wait", "barrier", "open rank1.json.gz", "barrier"], ["wait", "barrier", "close", "report"]
    assert done == ["5", "6", *begin, "7", "8", *end, "9", "10"]
    assert {index: note for index, note in notes.items() if note} == {8: ["the report"]}
    assert waiting == [False, True, True, False, False, False]  # no validation from before a recording until its end
    assert profiler._barrier_us == 1_700_000_000_000_000.5


def test_a_run_without_profile_has_no_extension_and_too_few_steps_are_an_error(tmp_path):
    schedule, layout = build("1f1b", 2, 2), Layout(2, 1, 1, 1)
    assert profiled_steps(trainer_of(tmp_path, 0, 0, schedule, layout)) is None
    assert profiled_steps(trainer_of(tmp_path, 3, 7, schedule, layout)) is not None
    with pytest.raises(ValueError, match=r"--profile 4 needs 6 steps, .* but the run has 5: use --steps 13"):
        profiled_steps(trainer_of(tmp_path, 4, 7, schedule, layout))
    assert profiled_steps(trainer_of(tmp_path, 4, 7, schedule, layout, restarted=True)) is None
