import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import save_steps
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def two_ranks_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    run_ranks(2, save_steps, run, [3, 5, 9])
    return run


@pytest.fixture
def run(two_ranks_run, tmp_path):
    """A copy of a two-rank run with checkpoints after 3, 5 and 9 steps, for a test to damage."""
    return Path(shutil.copytree(two_ranks_run, tmp_path / "run"))
