"""The backends Symmetric and CopyEngine between processes: on CPUs, in Triton's interpreter, or on one GPU."""

import os

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, Fp8Dispatch
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.expert_parallel.symmetric import SharedMemory, Symmetric
from moe_dualpipe.kernels.fp8 import RECIPES
from moe_dualpipe.models import MoE, StageOptions
from tests.machines.interpreter import prepare_rank
from tests.support.exchanges import check_round
from tests.support.expert_ids import KINDS, random_ids
from tests.support.kernels import DEVICE, error
from tests.support.models import with_choices

ON_GPU = DEVICE == "cuda"
EXPERTS, TOP_K = 8, 3
TOKENS, WIDTH, NUM_SMS = (300, 512, 20) if ON_GPU else (6, 16, 2)
needs_interpreter = pytest.mark.skipif(ON_GPU, reason="kernels run on the GPU, not on shared memory")


def prepare(patch):
    """Prepare this process, which is one of the ranks."""
    if ON_GPU:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # all ranks use the same GPU
        torch.cuda.set_device(0)
    else:
        prepare_rank(patch)


def build(backend=Symmetric, **options):
    """A backend with windows of NaN. Collective."""
    sizes = {"max_tokens": TOKENS, "hidden_size": WIDTH, "top_k": TOP_K, "num_sms": NUM_SMS, "slots": 4, "timeout": 60}
    ep = backend(EXPERTS, group.WORLD, memory=None if ON_GPU else SharedMemory(), **(sizes | options))
    ep.windows.views(ep.own)[1].fill_(-1)  # NaN in all dtypes
    if ON_GPU:
        torch.cuda.synchronize()
    torch.distributed.barrier()
    return ep


class ThroughHost(AllToAll):
    """AllToAll over gloo, also for rows on a GPU."""

    def all_to_all_counts(self, counts_R2):
        return super().all_to_all_counts(counts_R2.cpu())

    def all_to_all(self, rows, rows_out, rows_in):
        pending = super().all_to_all(rows.cpu(), rows_out, rows_in)
        return AsyncResult([pending], lambda: pending.wait().to(rows.device))


# ---- transfers ----


def rounds(rank, ranks, seeds, backend=Symmetric):
    """Results are those of all_to_all, bit for bit. All memory that no kernel has written is NaN."""
    prepare(pytest.MonkeyPatch())
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    ours, reference = build(backend), ThroughHost(EXPERTS, group.WORLD)
    common, own = (torch.Generator().manual_seed(1000 * seeds[0] + i) for i in (ranks, 100 + rank))
    for seed in seeds:
        k, wide_rows, kind = (int(torch.randint(n, (), generator=common)) for n in (TOP_K, 2, 4))
        dtype = (torch.bfloat16, torch.float32)[seed % 2]
        tokens = int(torch.randint(TOKENS + 1, (), generator=own)) * int(torch.randint(4, (), generator=own) > 0)
        ids = random_ids(own, tokens, k + 1, KINDS[kind], EXPERTS)
        width = WIDTH if wide_rows else WIDTH // 2
        x, wide = (torch.randn(tokens, width + more, generator=own).to(DEVICE, dtype) for more in (0, 8))
        # Rows that are far apart, at addresses that are not multiples of 16 bytes, and all the same.
        grads = (wide[:, 8:], wide[:, 1 : width + 1], x[:1].expand(tokens, width))[seed % 3]
        weights = torch.rand(ids.shape, generator=own).to(DEVICE)
        check_round(ours, reference, ids.to(DEVICE), x, weights, grads)
    rounding = Fp8Dispatch(ours, RECIPES["ue8m0"])
    received = rounding.dispatch(x, rounding.prepare(ids.to(DEVICE)), weights).wait().x_ND
    expected = reference.dispatch(x, reference.prepare(ids.to(DEVICE)), weights).wait().x_ND
    assert torch.equal(received[: len(expected)], rounding.recipe.quantize_rows(expected).read(x.dtype))
    ours.check()


# ---- layers ----


def build_layer(ep, rank, choices):
    """A layer and its tokens; on a GPU, in bfloat16."""
    config = with_choices(hidden_size=WIDTH, num_experts=EXPERTS, experts_per_token=TOP_K, **choices)
    torch.manual_seed(2)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    return MoE(config, ep, 0, StageOptions(seed=1)).to(DEVICE, dtype), layer_input(rank).requires_grad_()


def layer_input(seed):
    tokens = torch.randn(TOKENS - seed, WIDTH, generator=torch.Generator().manual_seed(seed))
    return tokens.to(DEVICE, torch.bfloat16 if ON_GPU else torch.float32)


def forward_and_backward(layer, x):
    """The output, and the gradients of x and of all parameters."""
    for leaf in (x, *layer.parameters()):
        leaf.grad = None
    y = layer(x)
    y.backward(y.detach().flip(0))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def layers_agree(rank, choices, backend=Symmetric):
    """Output and gradients equal those of all_to_all; on a GPU up to rounding, because tiles depend on the rows."""
    prepare(pytest.MonkeyPatch())
    expected = forward_and_backward(*build_layer(ThroughHost(EXPERTS, group.WORLD), rank, choices))
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    ep = build(backend, slots=2)
    for a, b in zip(forward_and_backward(*build_layer(ep, rank, choices)), expected, strict=True):
        assert error(a, b) < 1e-2 if ON_GPU else torch.equal(a, b)
    ep.check()
