"""An update of a small model by name, and the same in any layout of ranks, in fp64."""

import torch

from moe_dualpipe.models import ModelConfig, StageOptions
from moe_dualpipe.pipeline import Numerics, Parallel, Pipeline
from moe_dualpipe.pipeline.labels import Batch
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import build
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=4, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, num_shared_experts=1, init_std=0.5,
    sequence_loss=0.3, z_loss=0.2, router_bias=True,
)  # fmt: skip
COUNT = 8
"""Sequences of an update."""
PLAIN = build("1f1b", 1, COUNT // 2)


def update(model, schedule, batch, parallel=Parallel(), size=2, prepare=None, dtype=torch.float64, **options):  # noqa: B008
    """The loss, gradients, loads, router losses and biases of an update, by name. prepare: changes the parameters."""
    numerics = Numerics(dtype=dtype, options=StageOptions(seed=1, **options))
    pipeline = Pipeline(model, schedule, (size, batch[0].shape[1]), parallel, numerics)
    pipeline.balance.rate = 0.01
    for stage in pipeline.stages.values():
        if prepare is not None:
            prepare(stage.named_parameters())
    own = pipeline.num_sequences * pipeline.layout.dp_rank
    losses = pipeline.step(*Batch(*batch).rows(own, own + pipeline.num_sequences))
    pipeline.sum_gradients()
    found = {"loads": pipeline.balance.loads(pipeline.device)}
    found |= {"loss": torch.tensor(pipeline.mean_loss(losses))}
    means = pipeline.balance.after_step(found["loads"], pipeline.device)
    found |= {name: torch.tensor(value) for name, value in means.items()}
    for stage in pipeline.stages.values():
        found |= {
            name: p.grad / pipeline.num_micro_batches for name, p in stage.named_parameters() if p.grad is not None
        }
        found |= {name: b.clone() for name, b in stage.named_buffers() if "bias" in name}
    mtp = [stage.mtp.take_loss() for stage in pipeline.stages.values() if stage.mtp is not None]
    return found | ({"mtp loss": torch.tensor(pipeline.mean_loss(mtp))} if model.mtp_layers else {})


def assert_equal(found, expected):
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


def _with_options(_rank, given, options):
    found = update(*given, **options)
    return {name: tensor.numpy() for name, tensor in found.items()}  # tensors would need this process to live on


def in_layout(model, batch, name="1f1b", pp=1, dp=1, ep=1, cp=1, size=2, **options):
    """By rank: what it has of an update, and the same of an update in one process."""
    expected, schedule = update(model, PLAIN, batch, **options), build(name, pp, COUNT // size // dp)
    ranks = run_ranks(pp * dp * cp, _with_options, (model, schedule, batch, Parallel(ep, cp=cp), size), options)
    assert {key for values in ranks for key in values} == expected.keys()
    for rank, values in enumerate(ranks):
        place = Layout(pp, dp, ep, rank, cp=cp).replica % ep
        own = {key: expected[key].chunk(ep)[place] if ".experts." in key else expected[key] for key in values}
        yield {key: torch.from_numpy(value) for key, value in values.items()}, own


def check_layout(*given, **options):
    """An update in this layout equals that of one process."""
    for found, expected in in_layout(*given, **options):
        assert_equal(found, expected)
