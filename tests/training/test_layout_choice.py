"""The layout of a run: what was asked for if it fits, or else the nearest one, with the same sequences in a step."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.models import ModelConfig, split
from moe_dualpipe.runtime.layout import divisors
from moe_dualpipe.schedule import NAMES, Costs, ScheduleError, build, fill
from moe_dualpipe.training import TrainConfig, layout_choice
from moe_dualpipe.training.layout_choice import choose
from moe_dualpipe.training.options import parse_arguments
from tests.support.runs import TEXT, change, make_run, options


def asking(layers=8, experts=12, **changes) -> TrainConfig:
    model = ModelConfig(num_layers=layers, num_experts=experts, experts_per_token=1, num_dense_layers=0)
    return options(**{"model": model, "pp": 2, "ep": 2, "batch_size": 48, "micro_batch_size": 1, **changes})


# ---- The nearest layout ----


@st.composite
def configs(draw):
    experts = draw(st.sampled_from([1, 2, 6, 8, 12]))
    return asking(
        draw(st.integers(1, 14)), experts, pp=draw(st.sampled_from([None, 1, 2, 3, 4, 6])),
        ep=draw(st.sampled_from(divisors(experts))), schedule=draw(st.sampled_from(["auto", *NAMES])),
        batch_size=draw(st.integers(1, 48)), micro_batch_size=draw(st.sampled_from([None, 1, 2, 3, 4])),
    )  # fmt: skip


def runs(config, name, pp, ep, processes, size) -> bool:
    """Whether such a run can be built."""
    dp, batch = processes // pp, config.batch.batch_size
    if processes % pp or batch % (dp * size) or dp % ep or config.model.num_experts % ep:
        return False
    try:
        split(config.model, build(name, pp, batch // dp // size, None).num_stages)
    except ValueError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(configs(), st.integers(1, 24))
def test_a_choice_keeps_the_batch_can_run_and_is_the_nearest(config, processes):
    parallel, batch = config.parallel, config.batch
    pp, ep, size = parallel.pp or processes // parallel.ep or 1, parallel.ep, batch.micro_batch_size or 2

    def distance(choice_pp, choice_ep):
        return math.prod(Fraction(max(a, b), min(a, b)) for a, b in ((pp, choice_pp), (ep, choice_ep)))

    names = dict.fromkeys((parallel.schedule, "auto", "dualpipev", "1f1b", "interleaved_1f1b"))

    def schedule(name, p, e):
        return name if name != "auto" else "1f1b" if p == e == 1 else "dualpipev" if p % 2 else "dualpipe"

    valid = [
        (p, e)
        for p, e, name, s in itertools.product(
            divisors(processes), divisors(config.model.num_experts), names, divisors(size)
        )
        if runs(config, schedule(name, p, e), p, e, processes, s)
    ]
    try:
        found = choose(config, processes, strict=False)
    except ValueError as error:
        assert not valid and "use" not in str(error)
        return
    layout = found.layout
    assert layout.pp * layout.dp == processes
    assert layout.dp * found.schedule.num_micro_batches * found.micro_batch_size == batch.batch_size
    assert runs(config, found.name, layout.pp, layout.ep, processes, found.micro_batch_size)
    assert distance(layout.pp, layout.ep) == min(distance(p, e) for p, e in valid)
    if found.changed:
        with pytest.raises(ValueError) as error:
            choose(config, processes)
        assert str(error.value).startswith(found.changed)
    else:
        assert choose(config, processes) == found and (layout.pp, layout.ep) == (pp, ep)


@pytest.mark.parametrize(
    ("batch", "seq_len", "free", "size"), [
        (1, 8, 99, 1), (2, 8, 99, 2), (48, 8, 99, 48), (48, 1024, 99, 16), (6, 16384, 99, 2), (48, 8, 20, 16),
        (48, 8, 3, 3),
    ],
)  # fmt: skip
def test_one_process_has_no_micro_batches_that_it_does_not_need(batch, seq_len, free, size):
    """free: the largest micro-batch that fits into memory."""
    config = asking(pp=1, ep=1, batch_size=batch, seq_len=seq_len, micro_batch_size=None)
    found = choose(config, 1, problem=lambda choice: "too large" * (choice.micro_batch_size > free))
    assert (found.name, found.schedule.num_micro_batches, found.micro_batch_size) == ("1f1b", batch // size, size)


def test_one_process_takes_a_number_of_micro_batches_that_was_typed():
    assert choose(asking(pp=1, ep=1, micro_batch_size=3), 1).schedule.num_micro_batches == 16
    assert choose(asking(pp=1, ep=2), 2).name == "dualpipev"


def test_a_restart_with_fewer_processes_has_fewer_context_ranks():
    config = asking(pp=None, ep=2, cp=4, seq_len=16)
    layouts = {n: choose(config, n, strict=n == 4).layout for n in (4, 2, 1)}
    assert {n: (one.pp, one.dp, one.cp, one.ep) for n, one in layouts.items()} == {
        4: (1, 1, 4, 2), 2: (1, 1, 2, 2), 1: (1, 1, 1, 1),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"^--cp 4 does not divide 2 processes: use --cp 2$"):
        choose(config, 2)


def test_a_micro_batch_has_2_sequences_or_1_if_the_schedule_needs_more_micro_batches():
    for batch_size, size in ((16, 2), (8, 2), (4, 1), (6, 1), (24, 2)):
        found = choose(asking(pp=2, ep=1, batch_size=batch_size, micro_batch_size=None), 2)
        assert (found.micro_batch_size, found.schedule.num_micro_batches) == (size, batch_size // size)
    with pytest.raises(ValueError, match=r"got 2 for 2 ranks \(interleaved_overlap needs 2\); use --schedule 1f1b$"):
        choose(asking(pp=2, ep=1, batch_size=2, micro_batch_size=None), 2)


def test_a_list_of_layers_is_for_one_layout_and_another_one_goes_on_without_it():
    config = change(asking(pp=4, ep=1), layers="3,2,2,1")
    assert choose(config, 4).layout.pp == 4
    found = choose(config, 3, strict=False)
    assert found.layout.pp == 3 and found.changed.startswith("--pp 4 does not divide")


def test_memory_decides_between_layouts_and_refuses_the_one_that_was_typed():
    def too_large(choice):
        return "" if choice.layout.pp >= 4 else f"pp {choice.layout.pp} needs more"

    with pytest.raises(ValueError, match=r"^pp 2 needs more$"):
        choose(asking(), 4, True, too_large)
    found = choose(asking(), 4, False, too_large)
    assert (found.layout.pp, found.layout.dp, found.changed) == (4, 1, "pp 2 needs more")
    with pytest.raises(ValueError, match=r"^--ep 2 does not divide 1 data-parallel rank "):
        choose(asking(), 2, False, too_large)


def test_a_run_keeps_what_was_asked_for_in_another_layout(tmp_path):
    """Only a layout that a file names may be replaced."""
    file = tmp_path / "run.toml"
    file.write_text("[parallel]\npp = 2\nep = 2\nmove_experts_every = 5\n")
    arguments = [str(file), "--device", "cpu", "--data", TEXT, "--out", str(tmp_path / "run")]
    kept, other = (make_run(arguments, 0, processes) for processes in (4, 1))
    for run, size in ((kept, 2), (other, 1)):
        assert (run.layout.pp, run.layout.ep, run.layout.dp) == (size, size, size)
        assert (run.config.parallel.pp, run.config.parallel.ep, run.config.parallel.move_experts_every) == (2, 2, 5)
    assert (kept.config.parallel.schedule, kept.config.batch.micro_batch_size) == ("dualpipe", 2)
    assert other.choice.changed.startswith("--pp 2 does not divide") and not kept.choice.changed
    assert make_run([*arguments, "--pp", "2"], 0, 3).choice.changed  # typed again, as in the file
    with pytest.raises(ValueError, match="--pp 4 does not divide 3 processes"):
        make_run([*arguments, "--pp", "4"], 0, 3)
    with pytest.raises(ValueError, match="--pp 2 does not divide 3 processes"):
        make_run(change(parse_arguments(arguments), move_experts_every=None), 0, 3)


def choice(processes, *options):
    return choose(parse_arguments(["--preset", "tiny", "--schedule", "mine.csv", *options]), processes)


def test_the_schedule_of_a_run_is_that_of_the_file_or_the_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = fill(build("dualpipe", 2, 4), Costs(F=29, B=49, W=16, FB=60))
    (tmp_path / "mine.csv").write_text(mine.to_csv())
    for processes, batch, size in ((2, 8, 2), (4, 16, 2), (2, 12, 3), (2, 4, 1)):
        chosen = choice(processes, "--pp", "2", "--batch-size", batch)
        assert (chosen.schedule, chosen.micro_batch_size, chosen.layout.pp) == (mine, size, 2)
    file = "--schedule mine.csv"
    for processes, words, problem in (
        (2, ["--micro-batch-size", "1"], f"{file} is for 2 pipeline ranks and 4 micro-batches: got 2 and 16; use"),
        (2, ["--batch-size", "3"], f"{file} is for 2 pipeline ranks and 4 micro-batches: got 2 and 3; use"),
        (3, ["--batch-size", "24"], f"{file} is for 2 pipeline ranks and 4 micro-batches: got 3 and 4; use"),
        (2, ["--set", "parallel.num_chunks=2"], f"{file} defines the stages of a rank: remove parallel.num_chunks"),
        (2, ["--set", "parallel.layers=1,2,1"], "parallel.layers 1,2,1 is for 3 stages, and the schedule has 2"),
    ):
        with pytest.raises(ValueError, match=f"^{problem}"):
            choice(processes, *words)


def test_a_file_that_is_no_schedule_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("0F0,0F0,0B0")
    reads, read = [], layout_choice.read_schedule
    monkeypatch.setattr(layout_choice, "read_schedule", lambda path: reads.append(path) or read(path))
    with pytest.raises(ScheduleError, match=r"^mine\.csv: stage 0 runs micro-batch 0 with 2 forwards"):
        choice(2)
    assert len(reads) == 1
