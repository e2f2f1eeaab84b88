"""examples/ray_train.py, with real workers of Ray, one of which is killed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import losses, records

ROOT = Path(__file__).parents[2]
KILLS_ITSELF = """
def kill_once(trainer, record):
    if record["step"] == 6 and trainer.layout.rank == 1 and trainer.run.resume is None:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)

"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ray_starts_new_workers_and_the_run_resumes(tmp_path):
    pytest.importorskip("ray.train", reason="needs Ray: pip install 'moe-dualpipe[ray]'")
    text = (ROOT / "examples" / "ray_train.py").read_text()
    for old, new in (
        ("STEPS, SAVE_EVERY, RESTARTS = 40, 10, 3", f"STEPS, SAVE_EVERY, RESTARTS = 8, 2, 1\n{KILLS_ITSELF}"),
        ("    train(config)", "    train(config, callbacks=[kill_once])"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "program.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"resumed from \S+/runs/ray/checkpoints/step-00000[46], ", done.stdout + done.stderr)
    assert list(losses(records(tmp_path / "runs" / "ray"))) == list(range(1, 9))
