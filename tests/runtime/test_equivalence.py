"""The law of the runtime: a pipeline of any schedule and size computes what the single-process model computes.

Losses of each micro-batch are bit-equal; gradients, whose micro-batches may be added in another order, agree within
1e-13 cosine distance, element by element of every parameter. Real processes, gloo.
"""

from dataclasses import replace

import pytest
import torch
from ranks import cosine_distance, run_ranks

from moe_dualpipe.expert_parallel import AllToAll, Local
from moe_dualpipe.models import ModelConfig, TransformerStage, build_model, next_token_loss, share_embedding, split
from moe_dualpipe.overlap import WeightGrads
from moe_dualpipe.runtime import P2P, Executor, TensorSpec
from moe_dualpipe.runtime.replicas import check_equal, differing, gradient_norm, sum_gradients
from moe_dualpipe.schedule import NAMES, build
from moe_dualpipe.training.parallel import Layout, build_groups, replica_sets

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=8, num_dense_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    dense_size=48, expert_size=24, num_experts=6, experts_per_token=2, init_std=0.1,
)  # fmt: skip
MICRO_BATCHES, SIZE, LENGTH, SEED = 8, 2, 12, 3


def batch(data_rank=0):
    tokens = torch.randint(
        CONFIG.vocab_size, (MICRO_BATCHES, SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(data_rank)
    )
    return tokens[:, :, :-1], tokens[:, :, 1:]


def reference(data_ranks=1, fused_loss=False):
    """Losses of every data rank's micro-batches, and the gradients summed over all of them."""
    model = build_model(CONFIG, seed=SEED, fused_loss=fused_loss)
    losses = []
    for data_rank in range(data_ranks):
        for x, y in zip(*batch(data_rank), strict=True):
            loss = model.loss(model(x), y)
            loss.backward()
            losses.append(loss.detach())
    return model, losses


def make_pipeline(rank, name, pp, dp=1, ep=1, fused_loss=False):
    schedule = build(name, pp, MICRO_BATCHES, num_chunks=CONFIG.num_layers // pp if "interleaved" in name else None)
    layout = Layout(pp, dp, ep, rank)
    groups = build_groups(layout, schedule.placement, shared_embedding=CONFIG.mtp_layers > 0)
    experts = AllToAll(CONFIG.num_experts, groups.experts) if groups.experts else Local(CONFIG.num_experts)
    specs = split(CONFIG, schedule.num_stages)
    stages = {
        s: TransformerStage(CONFIG, specs[s], experts, SEED, fused_loss=fused_loss)
        for s in schedule.placement.stages[layout.pp_rank]
    }
    share_embedding(stages.values())
    hidden = TensorSpec((SIZE, LENGTH, CONFIG.hidden_size), torch.float32)
    executor = Executor(stages, P2P.connect(groups.pipeline, [hidden], torch.device("cpu")))
    named = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
    return schedule, layout, executor, experts, replica_sets(named, groups)


def run_step(schedule, layout, executor, return_outputs=False):
    xs, ys = batch(layout.dp_rank)
    own, last = layout.pp_rank, schedule.num_stages - 1
    criterion = executor.modules[last].loss if last in executor.modules else None
    return executor.step(
        schedule,
        {m: (xs[m],) for m in range(MICRO_BATCHES) if schedule.rank_of(0, m) == own},
        {m: (ys[m],) for m in range(MICRO_BATCHES) if schedule.rank_of(last, m) == own},
        criterion,
        return_outputs,
    )


def assert_norm_of_all_gradients(sets, grads):
    """Every parameter counts once, however many replicas it has and however its experts are divided."""
    expected = torch.stack([grad.double().square().sum() for grad in grads.values()]).sum().sqrt()
    torch.testing.assert_close(gradient_norm(sets, torch.device("cpu")), expected, rtol=1e-6, atol=0)


def every_one_equals_reference(rank, names, pp, fused_loss):
    model, losses = reference(fused_loss=fused_loss)
    seen = {}
    for name in names:
        try:
            seen[name] = equals_reference(rank, name, pp, model, losses)
        except BaseException as error:
            error.add_note(f"under {name}")
            raise
    return seen


def equals_reference(rank, name, pp, model, losses):
    schedule, layout, executor, _, sets = make_pipeline(rank, name, pp, fused_loss=model.fused_loss)
    weights = model.state_dict()
    for stage in executor.modules.values():
        for key, value in stage.state_dict().items():
            assert torch.equal(value, weights[key]), key

    result = run_step(schedule, layout, executor)
    assert len(executor.weight_grads) == 0
    for micro_batch, loss in result.losses.items():
        assert torch.equal(loss, losses[micro_batch]), f"loss of micro-batch {micro_batch}"
    assert result.outputs == {}

    grads = {n: p.grad for n, p in model.named_parameters()}
    for replicas in sets:
        sum_gradients(replicas)
        for key, parameter in replicas.parameters.items():
            assert cosine_distance(parameter.grad, grads[key]) < 1e-13, key
        check_equal(replicas)
    assert_norm_of_all_gradients(sets, grads)

    with torch.no_grad():
        again = run_step(schedule, layout, executor, return_outputs=True)
        for micro_batch, (output,) in again.outputs.items():
            assert torch.equal(output, model(batch()[0][micro_batch]))
            assert torch.equal(again.losses[micro_batch], losses[micro_batch])
    return sorted(result.losses), sorted(again.outputs)


@pytest.mark.parametrize("pp,fused_loss", [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_a_pipeline_of_any_schedule_equals_the_single_process_model(pp, fused_loss):
    names = [name for name in NAMES if pp > 1 or name not in ("chimera", "dualpipe")]
    seen = run_ranks(pp, every_one_equals_reference, names, pp, fused_loss)
    for name in names:
        assert sorted(m for on_rank in seen for m in on_rank[name][0]) == list(range(MICRO_BATCHES)), name
        assert sorted(m for on_rank in seen for m in on_rank[name][1]) == list(range(MICRO_BATCHES)), name


def agrees(rank, name, pp, dp, ep, fused_loss=False):
    """With the plain model, but not to the bit: experts' rows come from several ranks, a fused loss sums in chunks."""
    schedule, layout, executor, experts, sets = make_pipeline(rank, name, pp, dp, ep, fused_loss)
    model, losses = reference(dp)
    result = run_step(schedule, layout, executor)
    for micro_batch, loss in result.losses.items():
        expected = losses[layout.dp_rank * MICRO_BATCHES + micro_batch]
        assert (loss - expected).abs() <= 1e-6 * expected.abs()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for replicas in sets:
        sum_gradients(replicas)
        for key, parameter in replicas.parameters.items():
            part = experts.local_experts if ".experts." in key else range(len(grads[key]))
            expected = grads[key][part.start : part.stop]
            assert parameter.grad.shape == expected.shape
            assert cosine_distance(parameter.grad, expected) < 1e-11, key
    assert_norm_of_all_gradients(sets, grads)
    return len(result.losses), [set(replicas.parameters) for replicas in sets]


@pytest.mark.parametrize("name,pp,dp,ep", [("dualpipev", 1, 2, 2), ("dualpipe", 2, 2, 2), ("1f1b", 2, 2, 2)])
def test_expert_parallel_pipeline_agrees(name, pp, dp, ep):
    seen = run_ranks(pp * dp, agrees, name, pp, dp, ep)
    assert sum(count for count, _ in seen) == dp * MICRO_BATCHES
    assert all(len(dense) > 0 and len(experts) > 0 for _, (dense, experts, _) in seen)


@pytest.mark.parametrize("name,pp,ep", [("dualpipev", 1, 1), ("dualpipe", 2, 1), ("dualpipe", 2, 2)])
def test_a_pipeline_with_a_fused_loss_agrees_with_the_plain_model(name, pp, ep):
    seen = run_ranks(pp * ep, agrees, name, pp, ep, ep, True)
    assert set.union(*(names for _, sets in seen for names in sets)) == {
        n for n, _ in build_model(CONFIG).named_parameters()
    }


def test_data_parallel_without_expert_parallel_agrees():
    run_ranks(2, agrees, "dualpipev", 1, 2, 1)


def replicas_that_drifted(rank):
    *_, sets = make_pipeline(rank, "dualpipe", 2)
    assert [differing(replicas) for replicas in sets] == [{}, {}, {}]
    parameters = dict(sets[0].parameters)
    name = "layers.3.attention.qkv.weight"
    if rank == 1:
        with torch.no_grad():
            value = parameters[name][0, 0]
            value.copy_(torch.nextafter(value, torch.tensor(9.0)))
    assert [differing(replicas) for replicas in sets] == [{name: [0, 1]}, {}, {}]
    with pytest.raises(RuntimeError, match=rf"ranks 0, 1 disagree in {name}: replicas must stay bit-equal"):
        check_equal(sets[0])


def test_one_bit_of_drift_between_replicas_is_found():
    run_ranks(2, replicas_that_drifted)


def test_the_split_backward_is_used_and_changes_nothing():
    """Input gradients first, weight gradients later: the same numbers as at once, and really later."""
    model = build_model(CONFIG, seed=SEED)
    executor = Executor({0: model}, P2P.connect(None, [], torch.device("cpu")))
    weight_grads: WeightGrads = executor.weight_grads
    x, y = (t[0] for t in batch())
    with weight_grads.defer_to("later"):
        next_token_loss(model(x), y).backward()
    deferred = [n for n, p in model.named_parameters() if p.grad is None]
    assert {n.split(".", 2)[2] for n in deferred if n.startswith("layers.5")} == {
        "attention.qkv.weight", "attention.out.weight", "mlp.router.logits.weight", "mlp.experts.gate_up",
        "mlp.experts.down", "mlp.shared.gate_up.weight", "mlp.shared.down.weight",
    }  # fmt: skip
    weight_grads.run("later")
    plain = build_model(CONFIG, seed=SEED)
    next_token_loss(plain(x), y).backward()
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad), key


def test_bf16_model_accumulates_gradients_in_fp32():
    model = build_model(replace(CONFIG, num_layers=3), seed=SEED).bfloat16()
    for p in model.parameters():
        p.grad_dtype = torch.float32
    executor = Executor({0: model}, P2P.connect(None, [], torch.device("cpu")))
    x, y = (t[0] for t in batch())
    singles = {}
    for i in range(3):
        with executor.weight_grads.defer_to(i):
            next_token_loss(model(x), y).backward()
        executor.weight_grads.run(i)
        if i == 0:
            singles = {n: p.grad.clone() for n, p in model.named_parameters()}
    for key, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, singles[key] + singles[key] + singles[key], rtol=0, atol=0, msg=key)
