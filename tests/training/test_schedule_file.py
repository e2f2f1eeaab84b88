"""A schedule from a CSV file in place of a name."""

import pytest

from moe_dualpipe.schedule import Costs, build, fill
from moe_dualpipe.training.layout_choice import choose
from moe_dualpipe.training.options import parse_arguments


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled = fill(build("dualpipe", 2, 4), Costs(F=29, B=49, W=16, FB=60))
    (tmp_path / "mine.csv").write_text(filled.to_csv())
    return filled


def choice(processes, *options):
    return choose(parse_arguments(["--preset", "tiny", "--schedule", "mine.csv", *options]), processes)


def test_the_schedule_of_a_run_is_that_of_the_file(mine):
    for processes, batch in ((2, 8), (4, 16)):
        chosen = choice(processes, "--pp", "2", "--batch-size", batch)
        assert (chosen.schedule, chosen.micro_batch_size, chosen.layout.pp) == (mine, 2, 2)


@pytest.mark.parametrize("processes,options,problem", [
    (2, ["--batch-size", "16"], "mine.csv is for 2 pipeline ranks and 4 micro-batches: got 2 and 16; use"),
    (3, ["--batch-size", "24"], "mine.csv is for 2 pipeline ranks and 4 micro-batches: got 3 and 24; use"),
    (2, ["--set", "parallel.num_chunks=2"], "mine.csv defines the stages of a rank: remove parallel.num_chunks"),
])  # fmt: skip
@pytest.mark.usefixtures("mine")
def test_a_file_that_does_not_fit_is_refused(processes, options, problem):
    with pytest.raises(ValueError, match=f"^--schedule {problem}"):
        choice(processes, *options)
