"""Runs with random options: their losses do not depend on how they are divided, ordered, or interrupted."""

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dualpipe.models import RECOMPUTE, ModelConfig
from moe_dualpipe.schedule.build import NAMES
from moe_dualpipe.training.config import OptimizerConfig, TrainConfig
from moe_dualpipe.training.layout_choice import choose
from moe_dualpipe.training.rules import check_options
from tests.pipeline.test_padding import SHORT, padded, short_batch
from tests.support.checkpoints import tensors_of
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, losses, records, settings, train
from tests.support.updates import COUNT, PLAIN, assert_equal, update

STEPS = 3
LOSS, NORM = 2e-6, 2e-5  # relative; other layouts sum in another order


def random_model(rng: random.Random) -> ModelConfig:
    groups = rng.choice([1, 1, 2])
    return dataclasses.replace(
        MODEL,
        num_layers=rng.choice([4, 5, 8]), num_dense_layers=rng.choice([0, 1, 2]), num_heads=2, head_dim=16,
        attention=rng.choice(["gqa", "mla"]), q_rank=rng.choice([0, 8]), kv_rank=8, rope_dim=4, value_dim=8,
        num_experts=rng.choice([4, 8]), experts_per_token=rng.choice([1, 2, 3]), expert_groups=groups,
        top_groups=rng.randint(1, groups), num_shared_experts=rng.choice([0, 1, 2]),
        router_score=rng.choice(["softmax", "sigmoid"]), normalize_weights=rng.random() < 0.5,
        router_bias=rng.random() < 0.5, sequence_loss=rng.choice([0.0, 0.01]), z_loss=rng.choice([0.0, 0.001]),
        mtp_layers=rng.choice([0, 0, 0, 1]), dense_layers=rng.choice([(), (), (1,), (0, 3)]),
        tied_embeddings=rng.random() < 0.4, qkv_bias=rng.random() < 0.3, shared_gate=rng.random() < 0.3,
        rotary_fraction=rng.choice([1.0, 0.5]), yarn_factor=rng.choice([1.0, 4.0]), yarn_positions=8,
        group_score=rng.choice(["best_two", "best"]), out_bias=rng.random() < 0.3,
        rope_scaling=rng.choice(["yarn", "yarn", "llama3", "linear"]),
    )  # fmt: skip


def random_config(rng: random.Random, out: Path) -> tuple[TrainConfig, int]:
    """Options, and the number of processes."""
    pp, dp = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4)])
    name = rng.choice(["auto", *NAMES])
    config = settings(
        out, steps=STEPS, seq_len=16, eval_sequences=1, save_every=1, keep=None, model=random_model(rng), pp=pp,
        ep=rng.choice([e for e in (1, 2, 4) if dp % e == 0]), schedule=name, batch_size=dp * rng.choice([4, 8, 9]),
        num_chunks=rng.choice([None, 2]) if name == "interleaved_1f1b" else None,
        max_deferred=rng.choice([None, 1, 3]), recompute=rng.choice(list(RECOMPUTE)), fused_loss=rng.random() < 0.3,
        document_mask=rng.random() < 0.2, zero=rng.random() < 0.7, seed=rng.randrange(1000),
        save_async=rng.random() < 0.5,
        optim=OptimizerConfig(name=rng.choice(["adamw", "muon"]), warmup_steps=rng.choice([0, 1])),
    )  # fmt: skip
    return config, pp * dp


def valid_config(rng: random.Random, out: Path) -> tuple[TrainConfig, int]:
    """The first random options that fit together. Others are refused in one line."""
    while True:
        with contextlib.suppress(ValueError):
            config, processes = random_config(rng, out)
            check_options(config)
            choose(config, processes)
            return config, processes


def close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


@pytest.mark.parametrize("rng", range(30), indirect=True)
def test_losses_do_not_depend_on_overlap_layout_or_interruption(rng: random.Random, tmp_path: Path) -> None:
    config, processes = valid_config(rng, tmp_path / "run")
    dp = processes // (config.parallel.pp or 1)
    run_ranks(processes, train, config)
    first = records(tmp_path / "run")
    expected = losses(first)

    # Without overlap, and with another division of the optimizer state: bit-equal.
    other = change(config, out=str(tmp_path / "other"), overlap=False, zero=not config.parallel.zero)
    run_ranks(processes, train, other)
    assert losses(records(tmp_path / "other")) == expected, f"without overlap: {config}"
    tensors, others = (tensors_of(tmp_path / run / f"checkpoints/step-{STEPS:06d}") for run in ("run", "other"))
    differing = [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]
    assert not differing, f"differ without overlap: {differing}, {config}"

    # Without pipeline and expert parallelism, on the same data: equal up to rounding.
    plain = change(
        config, out=str(tmp_path / "plain"), pp=1, ep=1, schedule="1f1b", num_chunks=None, recompute="none",
        max_deferred=None, steps=1,
    )  # fmt: skip
    run_ranks(dp, train, plain)
    one = records(tmp_path / "plain")
    for kind, tolerance in (("loss", LOSS), ("grad_norm", NORM)):
        a, b = losses(first, kind)[1], losses(one, kind)[1]
        assert close(a, b, tolerance), f"{kind} of step 1: {a}, without parallelism {b}: {config}"

    # Resumed on the same ranks: bit-equal. On others: the next loss is equal up to rounding.
    second = str(tmp_path / "run" / "checkpoints" / "step-000002")
    run_ranks(processes, train, change(config, out=str(tmp_path / "resumed"), resume=second))
    assert losses(records(tmp_path / "resumed"))[STEPS] == expected[STEPS], f"resumed: {config}"
    moved = change(plain, out=str(tmp_path / "moved"), resume=second, steps=STEPS)
    run_ranks(dp, train, moved)
    a, b = expected[STEPS], losses(records(tmp_path / "moved"))[STEPS]
    assert close(a, b, LOSS), f"loss of step {STEPS}: {a}, resumed without parallelism {b}: {config}"


@pytest.mark.parametrize("rng", range(60), indirect=True)
def test_padding_changes_nothing_whatever_the_options(rng: random.Random, tmp_path: Path) -> None:
    config, _ = valid_config(rng, tmp_path)
    batch = short_batch((SHORT, *(rng.randint(0, SHORT) for _ in range(COUNT - 1))))
    options: dict[str, Any] = {"recompute": config.compute.recompute, "fused_loss": config.compute.fused_loss}
    model = dataclasses.replace(config.model, vocab_size=31, init_std=0.5)
    expected = update(model, PLAIN, batch, **options)
    assert_equal(update(model, PLAIN, padded(*batch, rng.randrange(31)), **options), expected)


@pytest.mark.parametrize("rng", range(40), indirect=True)
def test_a_random_schedule_in_a_file_is_refused_or_gives_the_same_loss(rng: random.Random, tmp_path: Path) -> None:
    """Each stage, or each micro-batch of each stage, is on a random rank."""
    ranks, stages, number, each = rng.choice([1, 2]), rng.choice([2, 4]), rng.choice([2, 4]), rng.random() < 0.5
    units = [(stage, batch) for batch in range(number) for stage in range(stages)]
    homes = {(stage, batch): rng.randrange(ranks) for stage, batch in units}
    rows = [list[str]() for _ in range(ranks)]
    for kind, ordered in (("F", units), ("B", units[::-1])):
        for stage, batch in ordered:
            rows[homes[stage, batch if each else 0]].append(f"{stage}{kind}{batch}")
    (tmp_path / "mine.csv").write_text("\n".join(map(",".join, rows)))
    plain = settings(tmp_path / "plain", steps=1, seq_len=16, batch_size=number, eval_sequences=1, model=MODEL)
    config = change(plain, schedule=str(tmp_path / "mine.csv"), out=str(tmp_path / "run"))
    try:
        choose(config, ranks)
    except ValueError:
        return
    run_ranks(ranks, train, config)
    run_ranks(1, train, plain)
    a, b = (losses(records(tmp_path / run))[1] for run in ("run", "plain"))
    assert close(a, b, LOSS), f"{rows}: {a}, without a file {b}"
