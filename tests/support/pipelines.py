"""Pipelines of a small model, compared with the same model in a single process."""

import re

import torch

from moe_dualpipe.expert_parallel import AllToAll, Local
from moe_dualpipe.expert_parallel.parameters import expert_ids, global_tensors
from moe_dualpipe.models import ModelConfig, StageOptions, TransformerStage, build_model, share_embedding, split
from moe_dualpipe.runtime import P2P, Executor, TensorSpec
from moe_dualpipe.runtime.groups import build_groups
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.runtime.replicas import Shards, check_equal, gradient_norm, replica_sets
from moe_dualpipe.runtime.stage_sums import sum_gradients
from moe_dualpipe.schedule import Costs, build, fill
from tests.support.ranks import cosine_distance

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
    """A model with the gradients summed over all data ranks' micro-batches, and the losses of these."""
    model = build_model(CONFIG, options=StageOptions(seed=SEED, fused_loss=fused_loss))
    losses = []
    for data_rank in range(data_ranks):
        for x, y in zip(*batch(data_rank), strict=True):
            loss = model.loss(model(x), y)
            loss.backward()
            losses.append(loss.detach())
    return model, losses


def freeze(module, pattern):
    """Freeze the parameters of which the global names of all tensors match the pattern."""
    ids = expert_ids(module)
    for name, parameter in module.named_parameters():
        tensors = global_tensors(name, parameter, ids.get(name))
        parameter.requires_grad_(not all(re.search(pattern, tensor) for tensor, _ in tensors))


def make_pipeline(rank, name, pp, dp=1, ep=1, fused_loss=False, frozen="nothing"):
    name, _, filled = name.partition("+")
    schedule = build(name, pp, MICRO_BATCHES, num_chunks=CONFIG.num_layers // pp if "interleaved" in name else None)
    if filled:
        schedule = fill(schedule, Costs(F=29, B=49, W=16, FB=60))
        assert schedule.name == f"{name}+fill"
    layout = Layout(pp, dp, ep, rank)
    groups = build_groups(layout, schedule.placement, shared_embedding=CONFIG.last_stage_embeds)
    experts = AllToAll(CONFIG.num_experts, groups.experts) if groups.experts else Local(CONFIG.num_experts)
    specs = split(CONFIG, schedule.num_stages)
    stages = {
        s: TransformerStage(CONFIG, specs[s], experts, StageOptions(SEED, fused_loss=fused_loss))
        for s in schedule.placement.stages[layout.pp_rank]
    }
    for stage in stages.values():
        freeze(stage, frozen)
    embedding = share_embedding(stages.values())
    hidden = TensorSpec((SIZE, LENGTH, CONFIG.hidden_size), torch.float32)
    executor = Executor(stages, P2P.connect(groups.pipeline, [hidden], torch.device("cpu")))
    return schedule, layout, executor, experts, replica_sets(stages.values(), groups, embedding)


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


def owned_gradients(sets):
    """The gradients of the tensors that this rank owns."""
    grads = []
    for one in sets:
        shards = Shards(one.only(trained=True), divide=True)
        found = shards.gradients(shards.updated_parameters)
        grads += [found[name] for name in shards.owned]
    return grads


def assert_norm_of_all_gradients(sets, grads):
    """`gradient_norm` counts every parameter once, however it is replicated or divided."""
    expected = torch.stack([grad.double().square().sum() for grad in grads.values()]).sum().sqrt()
    norm = gradient_norm(owned_gradients(sets), torch.device("cpu"))
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)


def compare(rank, name, pp, dp, ep, fused_loss, frozen, model, losses):
    """A step equals that of a single process: with one data rank, losses bit for bit.

    With several, within a tolerance: experts get rows of several ranks in one product. Returns the pipeline and the
    numbers of micro-batches with losses.
    """
    schedule, layout, executor, experts, sets = pipeline = make_pipeline(rank, name, pp, dp, ep, fused_loss, frozen)
    result = run_step(schedule, layout, executor)
    assert len(executor.weight_grads) == 0
    assert result.outputs == {}
    for micro_batch, loss in result.losses.items():
        expected = losses[layout.dp_rank * MICRO_BATCHES + micro_batch]
        assert (loss - expected).abs() <= (dp > 1) * 1e-6 * expected.abs(), f"loss of micro-batch {micro_batch}"
    grads = {n: p.grad for n, p in model.named_parameters()}
    for replicas in sets:
        sum_gradients(replicas)
        assert all((p.grad is None) != p.requires_grad for p in replicas.parameters.values())
        for key, parameter in replicas.only(trained=True).parameters.items():
            part = experts.local_experts if ".experts." in key else range(len(grads[key]))
            expected = grads[key][part.start : part.stop]
            assert parameter.grad.shape == expected.shape
            assert cosine_distance(parameter.grad, expected) < (1e-13 if dp == 1 else 1e-11), key
        check_equal(replicas)
    if dp == 1 or frozen == "nothing":
        assert_norm_of_all_gradients(sets, {n: grad for n, grad in grads.items() if not re.search(frozen, n)})
    return pipeline, sorted(result.losses)


def equals_reference(rank, name, pp, model, losses, frozen="nothing"):
    """Also without gradients, then with outputs.

    Returns the micro-batches with losses, those with outputs, and the numbers of replicas of the embedding.
    """
    pipeline, with_losses = compare(rank, name, pp, 1, 1, model.options.fused_loss, frozen, model, losses)
    with torch.no_grad():
        again = run_step(*pipeline[:3], return_outputs=True)
        for micro_batch, (output,) in again.outputs.items():
            assert torch.equal(output, model(batch()[0][micro_batch]))
            assert torch.equal(again.losses[micro_batch], losses[micro_batch])
    holders = [one.num_replicas for one in pipeline[-1] if "embedding.weight" in one.parameters]
    return with_losses, sorted(again.outputs), holders


def all_schedules_equal_reference(rank, names, pp, fused_loss, frozen="nothing"):
    model, losses = reference(fused_loss=fused_loss)
    seen = {}
    for name in names:
        try:
            seen[name] = equals_reference(rank, name, pp, model, losses, frozen)
        except BaseException as error:
            error.add_note(f"under {name}")
            raise
    return seen


def agrees(rank, name, pp, dp, ep, fused_loss=False, frozen="nothing"):
    """Compare with the plain loss of a single process. Returns the number of losses, and the parameters of each set."""
    pipeline, with_losses = compare(rank, name, pp, dp, ep, fused_loss, frozen, *reference(dp))
    return len(with_losses), [set(replicas.parameters) for replicas in pipeline[-1]]
