"""A run that cannot fit is refused: what ranks need, and what is said."""

import dataclasses

import pytest
import torch
from moe_dualpipe.training.memory import RankMemory, RankNeeds, check_memory, memory_problem, rank_needs

from moe_dualpipe.commands.train import main
from moe_dualpipe.models.experts import SwiGLUExperts
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training import memory
from moe_dualpipe.training.config import OptimizerConfig
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, SMALL, change, make_plan, make_trainer, settings

GIB = 2**30


def needs_and_use(rank, configs):
    """What is counted for this rank, and what it has allocated: weights, gradients, optimizer, copy."""
    found = []
    for config in configs:
        trainer = make_trainer(rank, config)
        parameters = {name: p for replicas in trainer.replicas for name, p in replicas.parameters.items()}
        copied = sum(t.nbytes for t in trainer.optimizer.tensors().values())
        gradients = 4 * sum(p.numel() for p in parameters.values() if p.requires_grad)
        used = sum(p.nbytes for p in parameters.values()), gradients, trainer.optimizer.state_bytes, copied
        found.append((dataclasses.astuple(rank_needs(trainer.plan))[:4], used))
    return found


@pytest.mark.long
def test_needs_equal_what_ranks_allocate(tmp_path):
    base = settings(tmp_path, model=dataclasses.replace(MODEL, vocab_size=3000))
    changes = [{"pp": 2, "ep": 2, "dtype": "bfloat16"}, {"pp": 1}, {"pp": 2, "schedule": "dualpipev", "zero": False}]
    changes += [
        {"model": dataclasses.replace(MODEL, experts="examples/layers/squared_relu.py:SquaredReLUExperts"), "ep": 2},
        {"model": dataclasses.replace(MODEL, tied_embeddings=True, shared_gate=True), "pp": 2, "schedule": "1f1b"},
        {"model": dataclasses.replace(MODEL, mtp_layers=1, dense_layers=(2,)), "pp": 2},
    ]
    for found in run_ranks(4, needs_and_use, [change(base, **change_) for change_ in changes]):
        for counted, used in found:
            assert counted == used


def test_no_need_is_overestimated(tmp_path):
    """With Muon, the optimizer state is only a lower bound."""
    muon = settings(tmp_path, optim=OptimizerConfig(name="muon", warmup_steps=2), dtype="bfloat16")
    for found in run_ranks(2, needs_and_use, [muon]):
        for counted, used in found:
            assert counted[:2] == used[:2]
            assert all(0.5 * use < count <= use for count, use in zip(counted[2:], used[2:], strict=True))


NEEDS = RankNeeds(GIB, 2 * GIB, 3 * GIB, 4 * GIB)
ADVICE = "use a smaller model or more ranks, or --no-check-memory to start anyway"


@pytest.mark.parametrize("ranks,problem", [
    ([RankMemory(0, NEEDS, 8 * GIB, None)], ""),
    ([RankMemory(0, NEEDS, None, None)] * 9, ""),
    ([RankMemory(0, NEEDS, 8 * GIB - 1, None)],
     "rank 0 needs 8.0 GiB of main memory (weights 1.0, optimizer 3.0, copy for checkpoints 4.0), and 8.0 GiB are "
     f"free: --no-save-async saves without a copy; otherwise {ADVICE}"),
    ([RankMemory(0, NEEDS, 5 * GIB, None)],  # too little also without a copy
     "rank 0 needs 8.0 GiB of main memory (weights 1.0, optimizer 3.0, copy for checkpoints 4.0), and 5.0 GiB are "
     f"free: {ADVICE}"),
    ([RankMemory(0, dataclasses.replace(NEEDS, copy=0), 5 * GIB, None)],
     "rank 0 needs 6.0 GiB of main memory (weights 1.0, gradients 2.0, optimizer 3.0), and 5.0 GiB are free: "
     f"{ADVICE}"),
    # machines of 1 and of 2 ranks; each rank reads a different number
    ([RankMemory(0, NEEDS, 9 * GIB, None), RankMemory(1, NEEDS, 16 * GIB, None), RankMemory(1, NEEDS, 15 * GIB, None)],
     "rank 1 needs 8.0 GiB of main memory (weights 1.0, optimizer 3.0, copy for checkpoints 4.0), all 2 ranks of its "
     f"machine 16.0 GiB, and 15.0 GiB are free: --no-save-async saves without a copy; otherwise {ADVICE}"),
    ([RankMemory(0, NEEDS, 8 * GIB, 6 * GIB)] * 2, ""),
    ([RankMemory(0, NEEDS, 8 * GIB, 6 * GIB), RankMemory(0, NEEDS, 8 * GIB, 5 * GIB)],
     f"rank 1 needs 6.0 GiB (weights 1.0, gradients 2.0, optimizer 3.0), and its GPU has 5.0 GiB free: {ADVICE}"),
    ([RankMemory(0, NEEDS, 7 * GIB, 6 * GIB)] * 2,
     "rank 0 needs 4.0 GiB of main memory (copy for checkpoints 4.0), all 2 ranks of its machine 8.0 GiB, and 7.0 GiB "
     f"are free: --no-save-async saves without a copy; otherwise {ADVICE}"),
])  # fmt: skip
def test_what_does_not_fit_is_named_with_the_numbers(ranks, problem):
    assert memory_problem(ranks) == problem


def check_with_little_memory_on_rank_1(rank, config):
    memory.free_main_memory = lambda: 2**20 if rank == 1 else 2**40
    launch = Launch(rank, 0, 2, 1)
    check_memory(make_plan(change(config, check_memory=False), rank, 2), launch)
    with pytest.raises(ValueError) as refused:
        check_memory(make_plan(config, rank, 2), launch)
    return str(refused.value)


class NotOnMeta(SwiGLUExperts):
    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        assert torch.ones(1).item() == 1  # raises on the meta device


def check_without_memory(rank, config):
    memory.free_main_memory = lambda: 2**10
    check_memory(make_plan(config, rank, 1), Launch(rank, 0, 1, 1))


def test_a_layer_that_cannot_be_counted_is_not_refused(tmp_path):
    config = settings(tmp_path, model=dataclasses.replace(MODEL, experts=f"{__name__}:NotOnMeta"))
    run_ranks(1, check_without_memory, config)


def test_all_ranks_refuse_if_one_machine_is_too_small(tmp_path):
    errors = run_ranks(2, check_with_little_memory_on_rank_1, settings(tmp_path, model=MODEL))
    assert errors[0] == errors[1]
    assert errors[0].startswith("rank 1 needs 0.0 GiB of main memory")


@pytest.mark.parametrize("size", [("num-layers", 2000), ("vocab-size", 10**9), ("hidden-size", 10**6)])
def test_a_huge_model_prints_one_line_and_exits_with_code_2(tmp_path, capsys, monkeypatch, size):
    monkeypatch.setattr(memory, "free_main_memory", lambda: GIB)
    with pytest.raises(SystemExit) as exited:
        main([*map(str, ("--device", "cpu", "--out", tmp_path, *SMALL, f"--model.{size[0]}", size[1]))])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: error: rank 0 needs ")
    assert error.count("\n") == 1
