"""Forward and backward of a model on one rank can be a CUDA graph: nothing in them waits for the GPU."""

import pytest
import torch

from moe_dualpipe.expert_parallel import local as local_backend
from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.models import ModelConfig, StageOptions, build_model, next_token_loss
from moe_dualpipe.pipeline.pipeline import Pipeline
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.schedule import build
from moe_dualpipe.tools.checks.host_syncs import host_syncs
from moe_dualpipe.training.config import OptimizerConfig
from tests.support.kernels import DEVICE

SIZES = {
    "hidden_size": 16, "num_layers": 2, "num_dense_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "dense_size": 24, "expert_size": 8, "num_experts": 4, "experts_per_token": 2, "vocab_size": 32, "init_std": 0.3,
}  # fmt: skip


@pytest.mark.skipif(DEVICE == "cuda", reason="a capture fails at a host sync")
def test_forward_and_backward_have_no_host_sync(monkeypatch):
    monkeypatch.setattr(local_backend, "count_choices", lambda *_: None)  # as on a GPU
    monkeypatch.setattr(ExpertOrder, "trimmed", lambda _order: pytest.fail("a host sync"))
    model = build_model(ModelConfig(**SIZES), options=StageOptions(seed=1, kernels="triton"))
    tokens, labels = torch.randint(0, 32, (2, 1, 6))
    with host_syncs("cpu") as found:
        next_token_loss(model(tokens), labels).backward()
    assert not found


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_training_with_graphs_has_the_bits_of_eager_execution():
    """--cuda-graphs. The tokens of each step choose other experts: sizes that depend on them are read on the device."""
    with join_world(DEVICE):
        ours, expected = (train(cuda_graphs) for cuda_graphs in (True, False))
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


def train(cuda_graphs):
    schedule = build("1f1b", 1, 3)
    options = StageOptions(seed=1, kernels="triton")
    pipeline = Pipeline(ModelConfig(**SIZES), schedule, (1, 6), DEVICE, options=options, cuda_graphs=cuda_graphs)
    optimizer, results = pipeline.optimizer(OptimizerConfig()), []
    for step in range(3):
        tokens = torch.randint(0, 32, (2, 3, 6), generator=torch.Generator().manual_seed(step))
        results += [*pipeline.step(*tokens), pipeline.sum_gradients(), pipeline.balance_experts(0.1)]
        optimizer.step(1e-2, 0.1)
        results += [p.detach().clone() for p in pipeline.stages[0].parameters()]
    return results
