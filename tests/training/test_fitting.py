"""The nearest division that fits: distances, what stays the same, and what a refused run says."""

import dataclasses
import re

import pytest
from moe_dualpipe.training.command_line import parse_arguments
from moe_dualpipe.training.fitting import MARGIN, Division, division_of, nearest_division, step_memory

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.training import memory
from tests.support.runs import SMALL, change, options, resolve

NOW = Division(4, 2, 2, 4, "none", False)
MODEL = ModelConfig(num_layers=8, num_experts=8)


def run(processes=1, **changes):
    config = options(model=MODEL, seq_len=128, micro_batch_size=4, micro_batches=8, save_async=False, **changes)
    return config, resolve(config, processes)


def largest(config, processes):
    return max(rank.total for rank in step_memory(config, resolve(config, processes)))


def test_distances_count_options_then_sizes():
    def far(**changes):
        return dataclasses.replace(NOW, **changes).distance(NOW)

    assert far() == 0
    assert far(fused_loss=True) < far(recompute="norms") < far(recompute="full") < far(pp=1)
    assert far(pp=1) < far(pp=4, ep=1)
    assert far(micro_batch_size=2) < far(micro_batch_size=1) < far(micro_batch_size=2, recompute="norms")
    assert far(ep=1) == far(ep=4)


def test_what_fits_already_is_the_nearest():
    config, setup = run()
    assert nearest_division(config, setup, largest(config, 1)) == ("", pytest.approx(largest(config, 1), rel=MARGIN))


@pytest.mark.parametrize(
    "processes,changes", [(1, {}), (2, {"pp": 2}), (4, {"pp": 2, "ep": 2}), (2, {"pp": 1})], ids=str
)
@pytest.mark.parametrize("share", [0.9, 0.6, 0.4, 0.2])
def test_the_suggestion_fits_and_keeps_the_batch(processes, changes, share):
    """The options are applied as a user would type them."""
    config, setup = run(processes, **changes)
    free = int(share * largest(config, processes))
    found = nearest_division(config, setup, free)
    assert found is not None
    text, needed = found
    assert needed <= free
    count, _, typed = text.rpartition(" processes with ")
    words = typed.split()
    pairs = dict(zip(words, [*words[1:], ""], strict=True))
    values = {word[2:].replace("-", "_"): pairs[word] for word in words if word.startswith("--")}
    values = {
        name: int(v) if v.isdigit() else v if v and not v.startswith("--") else True for name, v in values.items()
    }
    other, number = change(config, **values), int(count or processes)
    assert largest(other, number) <= free / (1 - MARGIN)
    again = resolve(other, number)
    sequences = [s.num_micro_batches * c.batch.micro_batch_size * n for s, c, n in (
        (setup.schedule, config, setup.layout.dp), (again.schedule, other, again.layout.dp)
    )]  # fmt: skip
    assert sequences[0] == sequences[1]
    assert division_of(other, again).options(division_of(config, setup)) in typed


def test_nothing_fits_into_nothing():
    config, setup = run()
    assert nearest_division(config, setup, 1000) is None


def test_more_processes_may_need_more_sequences():
    config = change(run()[0], micro_batch_size=1, micro_batches=2, recompute="full", fused_loss=True)
    setup = resolve(config)
    found = nearest_division(config, setup, int(0.3 * largest(config, 1)))
    assert found is not None
    text, needed = found
    words = re.fullmatch(r"(\d+) processes with --pp (\d+)(?: --ep (\d+))?(?: --micro-batches (\d+))? "
                         r"\((\d+) times the sequences in a step\)", text)  # fmt: skip
    assert words, text
    processes, pp, ep, micro_batches, times = (int(word or 1) for word in words.groups())
    other = change(config, pp=pp, ep=ep, micro_batches=micro_batches if words[4] else 2)
    again = resolve(other, processes)
    assert largest(other, processes) <= needed / (1 - MARGIN)
    assert times == processes and again.schedule.num_micro_batches * again.layout.dp == 2 * times


def test_a_copy_for_checkpoints_counts_on_a_cpu():
    config = change(run()[0], recompute="full", fused_loss=True, micro_batch_size=1, micro_batches=4, seq_len=2)
    setup, free = resolve(config), largest(config, 1)
    assert nearest_division(config, setup, free)[0] == ""
    found = nearest_division(change(config, save_async=True), setup, free)
    assert found is not None
    text, needed = found
    assert text.startswith("2 processes with --pp ")
    assert needed <= free


def test_a_run_that_does_not_fit_says_what_does(tmp_path, capsys, monkeypatch):
    arguments = ["--device", "cpu", "--out", tmp_path / "run", *SMALL, "--seq-len", 512, "--no-save-async"]
    needed = largest_of(arguments)
    monkeypatch.setattr(memory, "free_main_memory", lambda: needed // 2)
    with pytest.raises(SystemExit) as exited:
        main([*map(str, arguments)])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: error: rank 0 needs ")
    assert "activations " in error
    assert ": use --recompute " in error
    assert "on the fullest rank, a smaller model or more ranks, or --no-check-memory to start anyway\n" in error
    assert error.count("\n") == 1


def largest_of(arguments):
    return largest(parse_arguments([*map(str, arguments)]), 1)
