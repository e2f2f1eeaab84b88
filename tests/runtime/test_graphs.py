"""A micro-batch as a CUDA graph: training has the bits of eager execution. A CPU emulates the graph.

Plain-torch experts of these sizes are one operator without a host sync, torch's grouped product.
"""

import pytest
import torch

pytest.importorskip("triton")

from moe_dualpipe.expert_parallel import local as local_backend
from moe_dualpipe.kernels import routing
from moe_dualpipe.models import ModelConfig, StageOptions
from moe_dualpipe.pipeline.pipeline import Pipeline
from moe_dualpipe.runtime import graphs
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.schedule import build
from moe_dualpipe.training.config import OptimizerConfig
from tests.machines import emulated_graph
from tests.support.kernels import DEVICE

SIZES = {
    "hidden_size": 16, "num_layers": 3, "num_dense_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "dense_size": 24, "expert_size": 8, "num_experts": 5, "experts_per_token": 2, "vocab_size": 32, "init_std": 0.3,
    "router_bias": True,
}  # fmt: skip
MICRO_BATCHES, STEPS = 3, 3


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """On a CPU, emulate graphs, and route as on a GPU: without a count of choices, and without numpy."""
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "capture", emulated_graph.capture)
        monkeypatch.setattr(local_backend, "count_choices", lambda *_: None)
        monkeypatch.setattr(routing, "_stable_sort", lambda keys, _: keys.sort(stable=True))
    with join_world(DEVICE):
        yield


def batch(seed):
    return torch.randint(0, 32, (2, MICRO_BATCHES, 7), generator=torch.Generator().manual_seed(seed))


def train(cuda_graphs, steps=STEPS, options=None, skipped=(), dtype=torch.float32, **sizes):
    """Train, and return the results of each step: losses, norm, loads, router losses, gradients and weights."""
    config = ModelConfig(**(SIZES | sizes))
    options = options or StageOptions(seed=1)
    schedule = build("dualpipev", 1, MICRO_BATCHES)
    pipeline = Pipeline(config, schedule, (1, 7), DEVICE, dtype, options=options, cuda_graphs=cuda_graphs)
    next(iter(pipeline.stages.values())).embedding.weight.requires_grad_("tied_embeddings" in sizes)
    optimizer, pipeline.balance.rate = pipeline.optimizer(OptimizerConfig()), 0.1
    parameters = [p for stage in pipeline.stages.values() for p in stage.parameters()]
    for p in parameters:
        p.grad = torch.ones_like(p, dtype=p.grad_dtype) if p.requires_grad else None  # tensors that are not the graph's
    results = []
    for step in range(steps):
        losses = pipeline.step(*batch(step), sum_gradients=True)
        norm = pipeline.sum_gradients()
        grads = [p.grad.clone() for p in parameters if p.requires_grad]
        loads = pipeline.balance.loads(pipeline.device)
        router_losses = pipeline.balance.after_step(loads, pipeline.device)
        optimizer.drop_gradients() if step in skipped else optimizer.step(1e-2, 1 / norm)
        with torch.no_grad():
            validation = pipeline.step(*batch(step + 100))
        weights = [p.detach().clone() for p in parameters]
        results.append(
            [*losses, norm, loads, *map(torch.tensor, router_losses.values()), *grads, *weights, *validation]
        )
    return results


def assert_equal(ours, expected):
    for step, (mine, others) in enumerate(zip(ours, expected, strict=True)):
        for i, (one, other) in enumerate(zip(mine, others, strict=True)):
            assert torch.equal(one, other), f"step {step}, tensor {i}"


@pytest.mark.parametrize(
    "options, sizes",
    [
        (StageOptions(seed=1, recompute="full", fused_loss=True), {"tied_embeddings": True}),
        (StageOptions(seed=1, document_end_id=3), {"num_shared_experts": 1, "dtype": torch.bfloat16}),
    ],
)
def test_training_has_the_bits_of_eager_execution(options, sizes):
    """Also with skipped steps, frozen parameters, and gradients of an earlier batch.

    The two stages of the rank run one after the other.
    """
    ours, expected = (train(graphs, options=options, skipped=[1], **sizes) for graphs in (True, False))
    assert_equal(ours, expected)


@pytest.mark.long
def test_kernels_can_be_replayed():
    options = StageOptions(seed=1, kernels="triton")
    assert_equal(*(train(graphs, 1, options, num_layers=2) for graphs in (True, False)))
