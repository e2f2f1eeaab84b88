"""A micro-batch as one call: as a CUDA graph, which a CPU emulates, or as one function of torch.compile.

With a CUDA graph, training has the bits of eager execution. Plain-torch experts of these sizes are one operator without
a host sync, torch's grouped product. A compiled function differs by rounding. Most tests of it use "aot_eager", which
traces as for training, but generates no code.
"""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("triton")

from moe_dualpipe.data.batches import batch_of
from moe_dualpipe.expert_parallel import Completed
from moe_dualpipe.expert_parallel import local as local_backend
from moe_dualpipe.kernels import fuse, grouped_gemm, products, routing
from moe_dualpipe.models import ModelConfig, StageOptions
from moe_dualpipe.overlap import Collective, Comm
from moe_dualpipe.pipeline import Numerics, Pipeline
from moe_dualpipe.runtime import graphs, join_world
from moe_dualpipe.runtime.compiled import CompiledMicroBatch
from moe_dualpipe.schedule import build
from moe_dualpipe.training.config import OptimizerConfig
from tests.machines import emulated_graph
from tests.support.kernels import DEVICE
from tests.support.segments import module_of

SIZES = {
    "hidden_size": 16, "num_layers": 3, "num_dense_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "dense_size": 24, "expert_size": 8, "num_experts": 5, "experts_per_token": 2, "vocab_size": 32, "init_std": 0.3,
    "router_bias": True,
}  # fmt: skip
MICRO_BATCHES, STEPS = 3, 3


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """On a CPU, emulate graphs, and route as on a GPU: without a count of choices, and without numpy."""
    monkeypatch.setattr(fuse, "BACKEND", "aot_eager")
    monkeypatch.setattr(products, "_library", "mkl")  # oneDNN multiplies the rows of each expert in a call of its own
    monkeypatch.setattr(grouped_gemm, "generates_code", lambda _: False)
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "capture", emulated_graph.capture)
        monkeypatch.setattr(local_backend, "count_choices", lambda *_: None)
        monkeypatch.setattr(routing, "_stable_sort", lambda keys, _: keys.sort(stable=True))
    with join_world(DEVICE):
        yield


def batch(seed, end_id=None):
    inputs, labels = torch.randint(0, 32, (2, MICRO_BATCHES, 7), generator=torch.Generator().manual_seed(seed))
    return batch_of(inputs, labels, end_id)


def train(as_one, steps=STEPS, options=None, skipped=(), dtype=torch.float32, end_id=None, **sizes):
    """Train, and return the results of each step: losses, norm, loads, router losses, gradients and weights.

    as_one: "cuda_graph", "compiled", or "" for a schedule.
    """
    config = ModelConfig(**(SIZES | sizes))
    options = options or StageOptions(seed=1)
    schedule = build("dualpipev", 1, MICRO_BATCHES)
    pipeline = Pipeline(config, schedule, (1, 7), numerics=Numerics(DEVICE, dtype, options, as_one))
    next(iter(pipeline.stages.values())).embedding.weight.requires_grad_("tied_embeddings" in sizes)
    optimizer, pipeline.balance.rate = pipeline.optimizer(OptimizerConfig()), 0.1
    parameters = [p for stage in pipeline.stages.values() for p in stage.parameters()]
    for p in parameters:
        p.grad = torch.ones_like(p, dtype=p.grad_dtype) if p.requires_grad else None  # tensors that are not the graph's
    results = []
    for step in range(steps):
        losses = pipeline.step(*batch(step, end_id), sum_gradients=True)
        norm = pipeline.sum_gradients()
        grads = [p.grad.clone() for p in parameters if p.requires_grad]
        loads = pipeline.balance.loads(pipeline.device)
        router_losses = pipeline.balance.after_step(loads, pipeline.device)
        optimizer.drop_gradients() if step in skipped else optimizer.step(1e-2, 1 / norm)
        with torch.no_grad():
            validation = pipeline.step(*batch(step + 100, end_id))
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
        (StageOptions(seed=1), {"end_id": 3, "num_shared_experts": 1, "dtype": torch.bfloat16}),
    ],
)
def test_training_has_the_bits_of_eager_execution(options, sizes):
    """Also with skipped steps, frozen parameters, and gradients of an earlier batch.

    The two stages of the rank run one after the other.
    """
    ours, expected = (train(one, options=options, skipped=[1], **sizes) for one in ("cuda_graph", ""))
    assert_equal(ours, expected)


@pytest.mark.long
def test_kernels_can_be_replayed():
    options = StageOptions(seed=1, kernels="triton")
    assert_equal(*(train(one, 1, options, num_layers=2) for one in ("cuda_graph", "")))


# ---- one compiled function ----


def assert_close(ours, expected, relative):
    for step, (mine, others) in enumerate(zip(ours, expected, strict=True)):
        for i, (one, other) in enumerate(zip(mine, others, strict=True)):
            difference = torch.linalg.vector_norm(one.double() - other.double())
            assert difference <= relative * torch.linalg.vector_norm(other.double()), f"step {step}, tensor {i}"


COMPILED = {
    "tied": (StageOptions(seed=1), {"tied_embeddings": True}),
    "documents, shared experts": (StageOptions(seed=1), {"end_id": 3, "num_shared_experts": 1}),
    "latent attention": (
        StageOptions(seed=1), {"attention": "mla", "kv_rank": 6, "rope_dim": 4, "value_dim": 5, "router": "balanced"},
    ),
    "groups": (StageOptions(seed=1), {"num_experts": 8, "expert_groups": 4, "top_groups": 2, "qk_norm": "head"}),
}  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="whole micro-batches are compiled on CPUs")
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.quick("documents, shared experts")
def test_training_as_one_compiled_function_differs_by_rounding(name):
    """Also with skipped steps, frozen parameters, and gradients of an earlier batch. Each model is compiled once."""
    options, sizes = COMPILED[name]
    for scale in (1.0, 2.0):  # models of the same shapes
        each = partial(train, options=options, skipped=[1], num_layers=2, routed_scale=scale, **sizes)
        counters.clear()
        ours = each("compiled")
        assert counters["stats"]["unique_graphs"] == 1
        assert_close(ours, each(""), 1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="whole micro-batches are compiled on CPUs")
def test_gradients_of_16_bit_weights_add_up_in_fp32():
    ours, expected = (train(one, 1, dtype=torch.bfloat16, num_layers=2) for one in ("compiled", ""))
    assert [t.dtype for t in ours[0]] == [t.dtype for t in expected[0]]
    assert_close(ours, expected, 0.1)


@pytest.mark.long
@pytest.mark.skipif(DEVICE != "cpu", reason="whole micro-batches are compiled on CPUs")
def test_generated_code_differs_by_rounding(monkeypatch):
    monkeypatch.setattr(fuse, "BACKEND", "inductor")
    ours, expected = (train(one, hidden_size=48, expert_size=40) for one in ("compiled", ""))
    assert_close(ours, expected, 1e-5)


def test_rows_of_other_ranks_are_refused():
    """Autograd would not send their gradients back."""
    module = module_of(lambda _, x: (yield Comm("dispatch", Collective(Completed, Completed, joint=True), x)))
    with pytest.raises(ValueError, match="cannot exchange rows with other ranks"):
        CompiledMicroBatch([module], lambda y, _: y.sum()).model([torch.randn(3)], [torch.zeros(3)])


def test_operators_that_are_not_traced_have_the_shapes_that_tracing_assumes():
    ids_NK = torch.tensor([[1, 0], [2, -1], [0, 2]])
    order = routing._sort_by_key(ids_NK, ids_NK >= 0, 4, 6)
    rows, weights, ends = torch.randn(6, 8), torch.randn(3, 2), torch.tensor([1, 3, 6], dtype=torch.int32)
    operators = torch.ops.moe_dualpipe
    for operator, *arguments in (
        (operators.product_in_onednn, rows, torch.randn(8, 5)),
        (operators.grouped_mm_reference, rows, torch.randn(3, 8, 4), ends),
        (operators.grouped_mm_reference, rows.T, torch.randn(6, 4), ends),
        (operators.gather_sum, rows, order[2], weights), (operators.gather_sum, rows, order[2], None),
        (operators.sort_by_key, ids_NK, ids_NK >= 0, 4, 6),
    ):  # fmt: skip
        torch.library.opcheck(operator, tuple(arguments), test_utils=("test_schema", "test_faketensor"))
