"""train.py and an example as processes, with and without torchrun."""

import re

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
