"""Runs with multi-token prediction (MTP): metrics, resuming, parameter counts, and equal results in every layout."""

import dataclasses

import torch

from moe_dualpipe.models import build_model, expert_loads
from moe_dualpipe.runtime.replicas import differing
from tests.support.ranks import run_ranks
from tests.support.runs import (
    SHALLOW,
    introduction,
    make_trainer,
    settings,
)

MTP = dataclasses.replace(SHALLOW, mtp_layers=1)


def accounts(rank, config):
    """Check the loads. Returns the introduction and the replicas that differ, before and after changing one."""
    printed = introduction(rank, config)
    trainer = make_trainer(rank, config)
    x_BS, y_BS = trainer.run.text.batch(0, 0, 4, config.batch.seq_len)
    trainer.pipeline.step(x_BS, y_BS)
    model = build_model(config.model)
    model.loss(model(x_BS), y_BS)
    assert torch.equal(trainer.balance.loads(trainer.device), expert_loads(model))
    names = [name for replicas in trainer.replicas for name in differing(replicas)]
    if rank:
        trainer.stages[1].embedding.weight.data[5, 3] += 1
    return printed, names, [name for replicas in trainer.replicas for name in differing(replicas)]


def test_an_embedding_on_two_ranks_is_counted_once_and_compared(tmp_path):
    config = settings(tmp_path, model=MTP, schedule="1f1b")
    (printed, *found), (_, *found_there) = run_ranks(2, accounts, config)
    sizes = {name: p.numel() for name, p in build_model(MTP).named_parameters()}
    assert f": {sum(sizes.values()) / 1e6:.2f} M parameters" in printed
    assert "+ head + 1 MTP module (" in printed
    assert found == found_there == [[], ["embedding.weight"]]
