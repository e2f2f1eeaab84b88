"""Forward and backward of a model on one rank can be a CUDA graph: nothing in them waits for the GPU."""

import pytest
import torch

from moe_dualpipe.expert_parallel import local as local_backend
from moe_dualpipe.kernels.routing import ExpertOrder
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


def model():
    return build_model(ModelConfig(**SIZES), options=StageOptions(seed=1, kernels="triton")).to(DEVICE)


def batch(seed):
    return torch.randint(0, 32, (2, 1, 6), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def forward_and_backward(module, tokens, labels):
    for parameter in module.parameters():
        parameter.grad = None
    loss = next_token_loss(module(tokens), labels)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters())]


@pytest.mark.skipif(DEVICE == "cuda", reason="a capture fails at a host sync")
def test_forward_and_backward_have_no_host_sync(monkeypatch):
    monkeypatch.setattr(local_backend, "count_choices", lambda *_: None)  # as on a GPU
    monkeypatch.setattr(ExpertOrder, "trimmed", lambda _order: pytest.fail("a host sync"))
    with host_syncs("cpu") as found:
        forward_and_backward(model(), *batch(1))
    assert not found


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_has_the_bits_of_eager_execution():
    """Also for other tokens, which choose other experts: sizes that depend on them are read on the device."""
    module, given = model(), batch(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(module, *given)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(module, *given)
    for seed in (1, 2, 3):
        given.copy_(batch(seed))
        graph.replay()
        replayed = [t.clone() for t in captured]
        for ours, expected in zip(replayed, forward_and_backward(module, *batch(seed)), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_training_with_graphs_has_the_bits_of_eager_execution():
    """--cuda-graphs. The forward and backward of each micro-batch are whole, as in a graph."""
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
