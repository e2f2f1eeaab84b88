"""train.py and an example as processes, with and without torchrun."""

import contextlib
import io
import os
import re
from unittest import mock

import pytest

from examples import own_stages as example
from moe_dualpipe.schedule import build
from moe_dualpipe.training.options import parse_arguments
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, command, losses, records, train_and_listen


def test_torchrun_trains_and_prints_the_command_that_resumes_the_run(tmp_path):
    out = tmp_path / "run"
    done = command("--steps", 3, "--out", out, *SMALL, processes=2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"validation loss \d\.\d+ -> \d\.\d+ nats per byte", lines[-1])
    assert "dualpipe over 2 pipeline x 1 data-parallel ranks, on cpu in float32" in lines
    assert any(
        re.fullmatch(r"  stage 1 on pipeline ranks 0 and 1: layer 1 \+ head \(\d\d% of the work\)", s) for s in lines
    )
    assert f"saved {out}/checkpoints/step-000003" in lines
    assert "    | class " in done.stdout
    assert "loss" in done.stderr
    assert "tokens/s" in done.stderr
    (resume,) = [line.removeprefix("to resume: ") for line in lines if line.startswith("to resume: ")]
    assert re.match(r"\S*torchrun --nproc-per-node 2 train.py ", resume)
    config = parse_arguments(resume.split("train.py ")[1].split())
    assert f"resumed from {out}/checkpoints/step-000003, steps 4 to 6" in run_ranks(2, train_and_listen, config)[0]
    assert list(losses(records(out))) == [1, 2, 3, 4, 5, 6]


def own_stages(rank, name):
    """What the example prints on this rank; run_ranks has created the process group."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.dict(os.environ, RANK=str(rank)),
        mock.patch("torch.distributed.init_process_group"),
        mock.patch("torch.distributed.destroy_process_group"),
    ):
        example.main(name)
    return printed.getvalue()


@pytest.mark.long
def test_the_own_stages_example_gives_the_same_results_under_two_schedules(tmp_path):
    order = tmp_path / "order.csv"
    order.write_text(build("1f1b", 2, 8).to_csv())
    done = command("dualpipe", processes=2, script="examples/own_stages.py")
    assert done.returncode == 0, done.stderr
    pattern = r"stage \d has a gradient of norm \d\.\d{4}|micro-batch \d has a loss of \d\.\d{4}"
    ours, other = (
        set(re.findall(pattern, text)) for text in (done.stdout, "".join(run_ranks(2, own_stages, str(order))))
    )
    assert len(ours) == 2 + 8
    assert ours == other
