"""Programs side by side: each starts again from the weights of a seed, on the same sequences, and is scored alike."""

import pytest
import torch

from benchmarks.seconds import LRS, NANOGPT, PROGRAMS, Curve, Options, Windows, compare, draw, train
from moe_dualpipe.runtime.world import join_world
from tests.support.runs import TEXT

SMALL = Options(data=TEXT, budgets=(0.05, 0.1), seeds=2, batch_size=2, seq_len=16, held_out=8, rounds=2, compile=False)


def test_sequences_are_those_of_the_seed_and_none_is_of_the_last_tenth():
    text, other = Windows(SMALL), Windows(SMALL)
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        inputs, labels = text.batch(seed, step)
        assert inputs.shape == labels.shape == (2, 16) and torch.equal(inputs[:, 1:], labels[:, :-1])
        assert torch.equal(inputs, other.batch(seed, step)[0])
    assert not torch.equal(text.batch(0, 0)[0], text.batch(1, 0)[0])
    assert len(text.train_N) == (len(text.train_N) + len(text.held_out_N)) * 9 // 10
    inputs, labels = text.held_out
    assert torch.equal(inputs[0], text.held_out_N[:16]) and torch.equal(labels[-1], text.held_out_N[-16:])


@pytest.mark.parametrize("name", ["transformers, mixture", "ours, mixture", "ours, dense, AdamW"])
def test_a_program_starts_again_and_learns(name):
    text = Windows(SMALL)
    with join_world("cpu"):
        program = PROGRAMS[name](text)
        first = train(program, text, 0.003, 12, seed=1)
        other = train(program, text, 0.003, 3, seed=2)
        assert train(program, text, 0.003, 12, seed=1) == first < other < 5.6


def test_every_program_can_be_built():
    text = Windows(Options(**{**vars(SMALL), "compile": True}))
    with join_world("cpu"):
        for program in PROGRAMS.values():
            assert program(text)


def test_the_best_learning_rate_of_each_program_is_taken_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = Options(**{**vars(SMALL), "data": "shakespeare", "figure": tmp_path / "seconds.svg"})
    with join_world("cpu"):
        text = Windows(SMALL)
        curves = compare({"ours, dense": PROGRAMS["ours, dense"](text)}, text, SMALL)
    curve = curves["ours, dense"]
    assert [*curve.tried] == [*LRS] and curve.tried[curve.lr] == min(curve.tried.values())
    assert [len(seeds) for seeds in curve.losses] == [2, 2] and curve.losses[0][0] == curve.tried[curve.lr]
    assert "0.05 s, ours, dense: " in capsys.readouterr().out
    draw(curves, options)
    picture = (tmp_path / "seconds.svg").read_text()
    assert ">ours, dense<" in picture and ">nanoGPT, as published<" in picture and NANOGPT[1] < 2


def test_a_budget_is_a_number_of_steps():
    curve = Curve([10.0, 20.0, 30.0, 400.0, 500.0], 0.01, {0.01: 2.0}, [[1.5, 1.25, 1.75]])
    assert [curve.steps(seconds) for seconds in (0.001, 1, 30)] == [1, 50, 1500]
    assert curve.cells() == ["20.0 (10.0 to 500.0)", "**0.01** of 0.01: 2.000", "1.500 (1.250 to 1.750)"]
