"""Faults that appear only in parallel runs, injected on each rank by the name of the variant."""

import copy

import torch
import torch.distributed as dist

from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.models import ModelConfig

MODEL = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=3, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, num_shared_experts=1, router_bias=True,
    init_std=0.1,
)  # fmt: skip


def moe(run, layer):
    """The MoE of a layer, if this rank holds it; else None."""
    blocks = [stage.layers[str(layer)] for stage in run.stages.values() if str(layer) in stage.layers]
    return blocks[0].mlp if blocks else None


def backend(run, layer):
    """A copy of the expert-parallel backend for this layer alone."""
    layer = moe(run, layer)
    if layer is None:
        return None
    layer.expert_parallel = copy.copy(layer.expert_parallel)
    return layer.expert_parallel


def double_gradients(run):
    """The backward of combine in layer 2 returns twice the gradient: it adds up two copies of the whole gradient."""
    ep = backend(run, 2)
    original = ep.dispatch

    def dispatch(x_TD, route, weights_TK=None):
        if weights_TK is not None:  # the forward
            return original(x_TD, route, weights_TK)
        return original(2 * x_TD, route)

    ep.dispatch = dispatch


def swap_experts(run):
    """Rank 1 takes its two experts in the wrong order in layer 2."""
    layer = moe(run, 2)
    if dist.get_rank() == 1:
        original = layer.expert_parallel.dispatch
        ep = backend(run, 2)

        def dispatch(x_TD, route, weights_TK=None):
            first = route.local_ids_NK is None and route._order is None
            pending = original(x_TD, route, weights_TK)

            def finish():
                received = pending.wait()
                if first:
                    route.local_ids_NK = torch.where(route.local_ids_NK < 0, -1, 1 - route.local_ids_NK)
                return received

            return AsyncResult([], finish)

        ep.dispatch = dispatch


def keep_stale_bias(run):
    """Rank 1 does not update the bias of its router in layer 1."""
    if dist.get_rank() == 1:
        moe(run, 1).router.move_bias = lambda *_: None


def forget_sum(run):
    """Each rank keeps its own part of the gradients of dense parameters."""
    dense = run.replicas[0]
    object.__setattr__(dense, "group", None)


def double_weight_gradient(run):
    """In the first step, the weight gradient of expert 3 in layer 2 is added twice."""
    experts = moe(run, 2).experts
    if 3 in experts.local_experts:
        original, calls = run.balance.loads, []

        def loads(device):  # called after the backward of each step
            if not calls:
                experts.down.grad[experts.local_experts.index(3)] *= 2
            calls.append(device)
            return original(device)

        run.balance.loads = loads


def other_weights(run):
    """Rank 1 holds its experts in the wrong order."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            moe(run, 1).experts.down.copy_(moe(run, 1).experts.down.flip(0))


def corrupt_transfer(run):
    """Rank 0 sends activations with a wrong first value."""
    if dist.get_rank() == 0:
        kind = type(run.executor.p2p)  # each step has another one
        original = kind.send

        def send(p2p, tensors, peer):
            tensors[0].view(-1)[0] += 1
            return original(p2p, tensors, peer)

        kind.send = send


def fail(run):
    """Rank 1 fails in the expert layer."""
    if dist.get_rank() == 1:
        moe(run, 2).experts.forward = broken_forward


def broken_forward(rows_MD, *_):
    return rows_MD @ rows_MD


FAULTS = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        double_gradients, swap_experts, keep_stale_bias, forget_sum, double_weight_gradient,
        other_weights, corrupt_transfer, fail,
    )
}  # fmt: skip


def inject(run):
    FAULTS.get(run.variant.name, lambda _: None)(run)
