"""The order of an update: steps, a sum of the gradients, an optimizer. Everything else is refused in one line."""

from dataclasses import replace

import pytest
import torch

from moe_dualpipe.data.batches import batch_of
from moe_dualpipe.models import ModelConfig, StageOptions
from moe_dualpipe.pipeline import Numerics, Pipeline
from moe_dualpipe.runtime.learning_rate import OptimizerConfig
from moe_dualpipe.schedule import build
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=2, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, router_bias=True,
)  # fmt: skip
TOKENS = torch.arange(18).view(2, 9)
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


def pipeline_of(model=MODEL, ranks=1, **options):
    count = 4 if ranks > 1 else 2
    schedule = build("1f1b", ranks, count)
    numerics = Numerics(dtype=torch.float32, options=StageOptions(seed=1, **options))
    return Pipeline(model, schedule, (2 // count or 1, 8), numerics=numerics)


def frozen_step(pipeline):
    with torch.inference_mode():
        pipeline.step(*BATCH)


def halve(pipeline):
    with torch.no_grad():
        for stage in pipeline.stages.values():
            for parameter in stage.parameters():
                parameter.mul_(0.5)


WRONG = {
    "no step": (["sum"], "sum_gradients needs a step with gradients since the last sum: there was none"),
    "sum twice": (["step", "sum", "sum"], "sum_gradients needs a step with gradients since the last sum"),
    "without gradients": ([frozen_step, "sum"], "sum_gradients needs a step with gradients"),
    "another step": (
        ["started", "started"],
        r"step\(sum_gradients=True\) has started a sum: call sum_gradients before",
    ),
    "after a sum": (["step", "sum", "step"], "the gradients of the last sum are still there"),
    "no sum": (["step", "update"], "call sum_gradients between step and the update"),
    "update twice": (["step", "sum", "update", "update"], "call sum_gradients between step and the update"),
    "no sum, custom optimizer": (["step", halve, "step"], "the weights changed although the gradients were not summed"),
    "dtype": (["step", "sum", "update", lambda p: p.stages[0].double(), "step"], "are torch.float64 now, but the pipe"),
}


def run(pipeline, calls):
    optimizer = pipeline.optimizer(OptimizerConfig())
    known = {
        "step": lambda: pipeline.step(*BATCH), "started": lambda: pipeline.step(*BATCH, sum_gradients=True),
        "sum": pipeline.sum_gradients, "update": lambda: optimizer.step(0.1, 1.0),
    }  # fmt: skip
    return [known[call]() if isinstance(call, str) else call(pipeline) for call in calls]


@pytest.mark.parametrize(("calls", "message"), WRONG.values(), ids=WRONG)
def test_another_order_is_refused(calls, message):
    with pytest.raises(RuntimeError, match=message):
        run(pipeline_of(), calls)


def test_steps_add_up_until_the_sum_and_gradients_may_be_dropped_by_hand():
    def drop(pipeline):
        for stage in pipeline.stages.values():
            stage.zero_grad()

    once, twice, again = (run(pipeline_of(), calls) for calls in (
        ["step", "sum"], ["step", "started", "sum"], ["step", "sum", drop, "step", "sum", "update", "step", "sum"],
    ))  # fmt: skip
    assert twice[-1] == pytest.approx(2 * once[-1].item(), rel=1e-5)
    assert again[4].item() == once[-1].item() != again[-1].item()


def test_every_method_works_without_a_process_group():
    pipeline = pipeline_of(replace(MODEL, z_loss=0.1))
    losses = pipeline.step(*BATCH)
    assert pipeline.sum_gradients() > 0 and pipeline.mean_loss(losses) > 0
    assert pipeline.balance_experts(0.1).sum() == 16 * 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64])
def test_token_ids_of_any_integers(dtype):
    pipeline = pipeline_of()
    expected = pipeline.step(*BATCH)
    assert pipeline.step(*(tensor.to(dtype) for tensor in BATCH)) == expected


@pytest.mark.parametrize(("change", "message"), [
    (lambda tokens: tokens.numpy(), r"inputs must be a tensor of token ids: got ndarray; use torch.as_tensor\(\)"),
    (lambda tokens: tokens.tolist(), "inputs must be a tensor of token ids: got list"),
    (lambda tokens: tokens.float(), "inputs must be token ids, integers: got torch.float32"),
    (lambda tokens: tokens.to_sparse(), "inputs must be a dense tensor of token ids: got the layout torch.sparse_coo"),
    (lambda tokens: tokens.to("meta"), "inputs must be a dense tensor of token ids: got a meta tensor"),
    (lambda tokens: tokens[:1], r"inputs must be \[2, 8\], 2 micro-batches of \[1, 8\]: got \[1, 8\]"),
])  # fmt: skip
def test_other_inputs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        pipeline_of().step(change(BATCH[0]), BATCH[1])


def different_batches(rank):
    pipeline = pipeline_of(ranks=2)
    messages = []
    for step in (0, 1, 50, 100, 101):  # the first step is compared, and every 100th after it
        pipeline._num_steps = step
        inputs = torch.full((4, 8), rank)
        try:
            with torch.no_grad():
                pipeline.step(inputs, inputs)
        except ValueError as error:
            messages.append((step, str(error)))
    return messages


def test_the_ranks_of_a_pipeline_must_get_the_same_batch():
    for messages in run_ranks(2, different_batches):
        assert [step for step, _ in messages] == [0, 100]
        assert all("the ranks of a pipeline got different batches" in text for _, text in messages)


def test_the_label_of_the_end_of_a_document_is_ignored():
    """Two documents in one sequence have the loss of the documents alone."""
    end, pipeline = 30, pipeline_of()
    first, second = torch.tensor([1, 2, 3, end]), torch.tensor([4, 5, 6, 7, end])
    joined = torch.cat([first, second]).expand(2, -1)
    batch = batch_of(joined[:, :-1], joined[:, 1:], end)
    found = pipeline.mean_loss(pipeline.step(*batch))
    sums = 0.0
    for document in (first, second):
        stage = pipeline.stages[0]
        length = len(document) - 1
        sums += stage.loss(stage(document[None, :-1]), document[None, 1:]).item() * length
    assert found == pytest.approx(sums / 7, rel=1e-6)
    assert pipeline.count_labels([batch]) == 14
