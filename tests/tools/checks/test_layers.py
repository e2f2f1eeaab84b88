# ruff: noqa: ARG005 - methods that ignore an argument
"""The laws of layers: each wrong layer breaks the law that names its mistake, and published layers break none."""

import dataclasses
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from moe_dualpipe.cli import main
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.models import attach
from moe_dualpipe.overlap import Segmented
from moe_dualpipe.tools import checks
from moe_dualpipe.tools.checks import Report
from moe_dualpipe.tools.checks.layers import SMALL
from tests.support import own_layers, special_experts
from tests.support.own_layers import ParallelBlock, WithCache, WithoutCache

WRONG: dict[str, tuple[str, type, str, str]] = {}
"""The kind, class, law and words of each wrong layer."""


def wrong(name, base, law, words, **methods):
    """Add a wrong layer: a correct one with other methods."""
    kind = next(kind for kind, bases in KINDS.items() if issubclass(base, bases))
    made = type(name, (base,), {"__module__": __name__, **methods})
    setattr(sys.modules[__name__], name, made)
    WRONG[name] = kind, made, law, words
    return made


class GELU(nn.Module):
    """Correct experts."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.num_experts, self.is_part = num_local_experts, num_local_experts < config.num_experts
        self.up = nn.Parameter(0.3 * torch.randn(num_local_experts, config.expert_size, config.hidden_size))
        self.down = nn.Parameter(0.3 * torch.randn(num_local_experts, config.hidden_size, config.expert_size))

    def forward(self, x_MD, expert_offsets):
        ends = expert_offsets.tolist()
        return torch.cat([self.expert(e, x_MD[ends[e] : ends[e + 1]]) for e in range(self.num_experts)])

    def expert(self, e, rows):
        return F.linear(F.gelu(F.linear(rows, self.up[e])), self.down[e])


class TopK(nn.Module):
    """A correct router."""

    def __init__(self, config):
        super().__init__()
        self.k, self.experts = config.experts_per_token, config.num_experts
        self.score = nn.Linear(config.hidden_size, config.num_experts)

    def forward(self, x):
        return self.scores(x.flatten(0, -2)).topk(self.k)

    def scores(self, x_TD):
        logits_TE = self.score(x_TD)
        return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).softmax(-1)


KINDS = {"experts": (GELU, nn.ModuleList), "router": TopK, "attention": WithoutCache, "block": ParallelBlock}
plain, mlp, routed, attended = GELU.forward, GELU.expert, TopK.forward, WithoutCache.forward


def extended(base, **tensors):
    """A constructor that adds tensors: each from the config and the number of experts."""

    def build(self, config, *number):
        base.__init__(self, config, *number)
        for name, make in tensors.items():
            setattr(self, name, make(config, *number))

    return build


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):  # noqa: ARG004
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return 2 * grad


class Square(torch.autograd.Function):
    """Squares x, and keeps it in the layer."""

    @staticmethod
    def forward(ctx, x, layer):
        layer.kept, ctx.layer = x, layer
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.layer.kept, None


class Scale(torch.autograd.Function):
    """x * weight. The gradient of the weight is deferred, and also returned."""

    @staticmethod
    def forward(ctx, x, weight, weight_grads):
        ctx.save_for_backward(x, weight)
        ctx.weight_grads = weight_grads
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.weight_grads is not None and ctx.weight_grads.defers(weight):
            ctx.weight_grads.defer(weight, lambda: (x * grad).sum(0))
        return grad * weight, (x * grad).sum(0), None


class Dense(torch.autograd.Function):
    """Takes its gradient for contiguous."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad.view(-1).view(grad.shape)


class ScaleOfOne(nn.Module):
    weight_grads = None

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.hidden_size))

    def forward(self, rows):
        return Scale.apply(rows, self.weight, self.weight_grads)


# ---- wrong experts ----


def fails(when):
    def build(self, config, number):
        if when(config, number):
            raise RuntimeError(f"no {number} experts")
        GELU.__init__(self, config, number)

    return build


wrong("OneIsTooFew", GELU, "constructor", "RuntimeError: no 1 experts", __init__=fails(lambda _, n: n < 2))
wrong("AllOrOne", GELU, "constructor", "no 2 experts", __init__=fails(lambda c, n: n not in (1, c.num_experts)))
SHAPES, STATE, ALONE, SIZES = "shapes and dtypes", "no state", "rows independent", "any number of rows"
PRECISE, LARGE, TRAINED, GRADIENTS = "precision", "large values", "parameters get gradients", "gradients"
REPEATED, SAVED, DIVIDED, FLIGHT = (
    "deterministic",
    "saved and loaded",
    "any ep equals ep=1",
    "overlapped equals sequential",
)
wrong("ReturnsATuple", GELU, SHAPES, "got tuple", forward=lambda *a: (plain(*a), None))
wrong("ReturnsFp32", GELU, SHAPES, "got torch.float32. End forward with", forward=lambda *a: plain(*a).float())
wrong(
    "Fp32InBf16", GELU, SHAPES, "in torch.bfloat16, forward must return", forward=lambda *a: plain(*a) * torch.ones(1)
)
wrong(
    "Fp32Only",
    GELU,
    SHAPES,
    "expected m1 and m2 to have the same dtype",
    expert=lambda s, e, r: mlp(s, e, r.float()).to(r),
)
wrong("Overflows", GELU, SHAPES, "in torch.float32, the result has NaN or infinity at row 0 of expert 0",
      forward=lambda *a: plain(*a) * 1e60 / 1e60)  # fmt: skip
wrong("NeedsARow", GELU, SHAPES, "rows per expert)", expert=lambda s, e, r: mlp(s, e, r) * (1 + 0 * r.max()))
wrong("WritesItsInput", GELU, "input not written", "first at row", forward=lambda s, x, o: plain(s, x.data.mul_(2), o))
wrong("AddsNoise", GELU, REPEATED, "in eval mode, too", expert=lambda s, e, r: mlp(s, e, r) + torch.randn_like(r))


class Counts(GELU):
    calls = 0

    def forward(self, x_MD, expert_offsets):
        self.calls += 1
        return plain(self, x_MD, expert_offsets) / self.calls


class Remembers(GELU):
    scale = None

    def forward(self, x_MD, expert_offsets):
        self.scale = x_MD.detach().std() if self.scale is None else self.scale
        return plain(self, x_MD, expert_offsets) / self.scale


class StaleOffsets(GELU):
    """Computes the places of the experts once for each total, as a captured graph does."""

    def forward(self, x_MD, expert_offsets):
        self.kept = {**getattr(self, "kept", {})}
        return plain(self, x_MD, self.kept.setdefault(len(x_MD), expert_offsets))


class LeaksInTraining(GELU):
    """Beside dropout, which hides it from a comparison of two calls."""

    def forward(self, x_MD, expert_offsets):
        y_MD = F.dropout(plain(self, x_MD, expert_offsets), 0.5, self.training)
        return y_MD + 0.01 * x_MD.mean(0) if self.training else y_MD


wrong("CountsCalls", Counts, REPEATED, "two calls with the same input differ by")
wrong("RemembersTheFirst", Remembers, STATE, "after a call with another input")
wrong("KeepsOffsets", StaleOffsets, STATE, "after a call with another input")
wrong("Leaks", LeaksInTraining, ALONE, "in training mode, the result of row")
wrong("MixesInEval", GELU, ALONE, "in eval mode, the result of row",
      forward=lambda s, x, o: plain(s, x, o) + 0.01 * (not s.training) * x.mean(0))  # fmt: skip
wrong("SubtractsTheMean", GELU, ALONE, "statistics over rows", forward=lambda s, x, o: plain(s, x - x.mean(0), o))
wrong("HasACapacity", GELU, SIZES, "differs by", expert=lambda s, e, r: torch.cat([mlp(s, e, r[:6]), 0 * r[6:]]))
wrong(
    "WrongAbove64",
    GELU,
    SIZES,
    "row 64 of expert 3 differs",
    expert=lambda s, e, r: mlp(s, e, r) * (torch.arange(len(r)) < 64)[:, None],
)
wrong(
    "WrongAbove1000",
    GELU,
    SIZES,
    "[127, 128, 129, 700] rows",
    forward=lambda s, x, o: plain(s, x, o) * (1 - 0.1 * (len(x) > 1000)),
)
wrong(
    "WrongInBlocks",
    GELU,
    SIZES,
    "row 128 of expert 2",
    expert=lambda s, e, r: torch.cat(
        [mlp(s, e, r[:128]), *[1.01 * mlp(s, e, r[128:])] * (len(r) == 129), *[mlp(s, e, r[128:])] * (len(r) != 129)]
    ),
)
wrong("WrongAbove16Experts", GELU, DIVIDED, "of expert 16 differs", expert=lambda s, e, r: mlp(s, min(e, 15), r))
wrong(
    "DependsOnThePosition",
    GELU,
    SIZES,
    "not on the position of the row",
    expert=lambda s, e, r: mlp(s, e, r) * torch.linspace(1, 2, 999).to(r)[: len(r), None],
)
wrong(
    "NaNIfEmpty",
    GELU,
    SIZES,
    "the gradient of up of expert",
    expert=lambda s, e, r: mlp(s, e, r) + 0 * s.up[e].sum() / len(r),
)
wrong(
    "FivePercentOff",
    GELU,
    PRECISE,
    "in bf16, the result differs by",
    expert=lambda s, e, r: mlp(s, e, r) * (1.05 if r.dtype == torch.bfloat16 else 1),
)
wrong(
    "ExpOverflows",
    GELU,
    LARGE,
    "for inputs 1,000 times as large",
    expert=lambda s, e, r: (
        mlp(s, e, r) * (F.linear(r, s.up[e]).exp() / (1 + F.linear(r, s.up[e]).exp())).mean(-1, True)
    ),
)
wrong(
    "NeedsRowMajor",
    GELU,
    "any memory layout",
    "view size is not compatible",
    forward=lambda s, x, o: plain(s, x.view(-1).view_as(x), o),
)
wrong("DenseGradient", GELU, "any memory layout", "view size", forward=lambda s, x, o: Dense.apply(plain(s, x, o)))


def in_bf16_sums(rows, weight_FD):
    """A product whose sum is rounded to bf16 after each 4 terms."""
    y = rows.new_zeros(len(rows), len(weight_FD))
    for x, w in zip(rows.split(4, 1), weight_FD.split(4, 1), strict=True):
        y = y + F.linear(x, w)
    return y


wrong(
    "SumsInBf16",
    GELU,
    PRECISE,
    "in bf16, the result differs by",
    expert=lambda s, e, r: in_bf16_sums(F.gelu(in_bf16_sums(r, s.up[e])), s.down[e]),
)
wrong(
    "Forgets",
    GELU,
    TRAINED,
    "of expert 3 gets no gradient (like 1 other weight): the result does",
    expert=lambda s, e, r: mlp(s, e, r) if e < s.num_experts - 1 or s.is_part or s.num_experts == 1 else 0 * r,
)
wrong(
    "CutsOffAWeight",
    GELU,
    TRAINED,
    "down of expert 0 gets no gradient (like 3 other weights), although",
    expert=lambda s, e, r: F.linear(F.gelu(F.linear(r, s.up[e])), s.down[e].detach()),
)
wrong(
    "DoublesAGradient",
    GELU,
    GRADIENTS,
    "the gradient of down of expert 0 is wrong",
    expert=lambda s, e, r: F.linear(F.gelu(F.linear(r, s.up[e])), Doubled.apply(s.down[e])),
)
wrong(
    "TiedOnce",
    GELU,
    GRADIENTS,
    "the gradient of up of expert 0 is wrong",
    expert=lambda s, e, r: mlp(s, e, r) + F.linear(r, s.up[e].detach()) @ s.up[e],
)
wrong("CutsOffTheInput", GELU, GRADIENTS, "the input gets no gradient", forward=lambda s, x, o: plain(s, x.detach(), o))
wrong("TakesTheNext", GELU, DIVIDED, "over 2 ranks", expert=lambda s, e, r: mlp(s, (e + 1) % s.num_experts, r))
wrong(
    "DoublesInParts",
    GELU,
    DIVIDED,
    "down of expert 0 differs by 1.0e+00 (about 2 times",
    expert=lambda s, e, r: F.linear(F.gelu(F.linear(r, s.up[e])), Doubled.apply(s.down[e]) if s.is_part else s.down[e]),
)
wrong(
    "PlainTensor",
    GELU,
    SAVED,
    "not in its state_dict()",
    __init__=extended(GELU, scale=lambda c, _: 1 + torch.rand(c.hidden_size)),
    expert=lambda s, e, r: mlp(s, e, r) * s.scale.to(r),
)
wrong(
    "Keeps", GELU, FLIGHT, "keeps tensors for later in `self`", forward=lambda s, x, o: plain(s, Square.apply(x, s), o)
)
wrong("DefersTwice", nn.ModuleList, "split backward", "differs by 1.0e+00 (about 2 times as large) if weight gradients",
      __init__=lambda s, config, n: nn.ModuleList.__init__(s, (ScaleOfOne(config) for _ in range(n))))  # fmt: skip


def summed_over_ranks(self, x_MD, expert_offsets):
    y_MD = plain(self, x_MD, expert_offsets)
    if dist.is_initialized():
        dist.all_reduce(y_MD.detach().mean(0))
    return y_MD


wrong("Sums", GELU, "no collectives", "first all-reduce, float64[16]", forward=summed_over_ranks)
DRAWN = {"reset_expert": lambda s, e: [nn.init.normal_(p[e], std=0.3) for p in s.parameters()]}  # any shape is built


def bias_on_ranks(self, config, number):
    GELU.__init__(self, config, number)
    self.bias = nn.Parameter(torch.zeros(number, config.hidden_size)) if self.is_part else None


wrong("HasABiasOnRanks", GELU, SAVED, "ep=2 has the tensor bias.0", __init__=bias_on_ranks, **DRAWN)


def ordered(self, x_ND, order, weights_NK):
    y_MD = plain(self, x_ND[order.gather_idx_M], order.expert_offsets) * self.scaled(weights_NK, order)
    return torch.zeros_like(x_ND).index_add(0, order.gather_idx_M, y_MD.to(x_ND)) + 0 * weights_NK.sum().to(x_ND)


def choice_weights(weights_NK, order):
    return weights_NK.flatten()[order.choice_idx_M, None]


CHOICES = {"takes_order": True, "forward": ordered}
wrong("IgnoresWeights", GELU, "choices of a row", "differs by", **CHOICES, scaled=lambda s, w, o: 1)
wrong(
    "DetachesWeights",
    GELU,
    "choices of a row",
    "the gradient of weights_NK differs by 1.0e+00",
    **CHOICES,
    scaled=lambda s, w, o: choice_weights(w.detach(), o),
)

# ---- wrong routers, attention and blocks ----

wrong("OnlyIds", TopK, SHAPES, "must return weights_TK and ids_TK: got Tensor", forward=lambda s, x: routed(s, x)[1])
wrong(
    "WeightsInBf16",
    TopK,
    SHAPES,
    "must be in fp32 or fp64: got torch.bfloat16",
    scores=lambda s, x: s.score(x).softmax(-1),
)
wrong(
    "IdsInInt32",
    TopK,
    SHAPES,
    "ids must be int64: got torch.int32",
    forward=lambda s, x: (routed(s, x)[0], routed(s, x)[1].int()),
)
wrong("KeepsSequences", TopK, SHAPES, "must both be [24, K]: got [4, 6, 2]", forward=lambda s, x: s.scores(x).topk(s.k))
wrong(
    "CountsFromOne",
    TopK,
    SHAPES,
    "ids are global, from 0 to 3",
    forward=lambda s, x: (routed(s, x)[0], routed(s, x)[1] + 1),
)
wrong(
    "ChoosesTwice",
    TopK,
    SHAPES,
    "more than once",
    forward=lambda s, x: (routed(s, x)[0], routed(s, x)[1][:, :1].expand(-1, s.k)),
)
wrong(
    "HidesSkips",
    TopK,
    SHAPES,
    "skips_choices is False",
    skips_choices=False,
    forward=lambda s, x: (routed(s, x)[0], routed(s, x)[1].masked_fill(routed(s, x)[0] < 0.3, -1)),
)
wrong(
    "SkipsWithInfinity",
    TopK,
    SHAPES,
    "id -1 must be finite, too",
    forward=lambda s, x: (routed(s, x)[0].masked_fill(routed(s, x)[0] < 0.3, torch.inf), routed(s, x)[1]),
)
wrong(
    "Draws",
    TopK,
    REPEATED,
    "random numbers in eval mode",
    forward=lambda s, x: (s.scores(x.flatten(0, -2))[:, :1], torch.multinomial(s.scores(x.flatten(0, -2)), 1)),
)
wrong(
    "ExpWithoutMaximum",
    TopK,
    LARGE,
    "is not finite",
    scores=lambda s, x: (e := s.score(x).double().exp()) / e.sum(-1, True),
)
wrong(
    "FixedWeights",
    TopK,
    TRAINED,
    "score.weight gets no gradient (like 1 other weight), although",
    forward=lambda s, x: (routed(s, x)[0].detach() + 0 * x.flatten(0, -2)[:, :1], routed(s, x)[1]),
)
wrong(
    "Straight",
    TopK,
    GRADIENTS,
    "the gradient of the input is wrong",
    scores=lambda s, x: (p := TopK.scores(s, x)) + ((s.score(x) / 2).softmax(-1) - p).detach(),
)
wrong(
    "SeesTheFuture",
    WithoutCache,
    ALONE,
    "mask later positions",
    forward=lambda s, x: attended(s, x) + x.sum(1, True),
)
wrong(
    "CountsTheLength",
    WithoutCache,
    "generation",
    "with 3 new positions after 0",
    forward=lambda s, x: attended(s, x) / x.shape[1],
)
wrong(
    "MixesSequences",
    WithoutCache,
    ALONE,
    "of sequence 0 changes by",
    forward=lambda s, x: attended(s, x - x.mean(0)),
)
wrong(
    "FewSequences",
    WithoutCache,
    SIZES,
    "sequence 64 differs",
    forward=lambda s, x: attended(s, x) * (torch.arange(len(x)) < 64)[:, None, None],
)
wrong(
    "ForgetsThePast",
    WithCache,
    "generation",
    "with 1 new position after 3. Append the new keys",
    forward=lambda s, x, cache=None: s.inner(x),
)
wrong(
    "IgnoresTheMask",
    WithCache,
    "document mask",
    "the mask mask_B1SS is not used",
    forward=lambda s, x, mask_B1SS=None, cache=None: s.inner(x, cache),
)
wrong(
    "MasksBothWays",
    WithCache,
    "document mask",
    "with a mask of one document, position",
    forward=lambda s, x, mask_B1SS=None, cache=None: s.inner(
        x, cache, None if mask_B1SS is None else mask_B1SS | mask_B1SS.mT
    ),
)
wrong("DropsAPosition", WithoutCache, SHAPES, "got [3, 7, 16]", forward=lambda s, x: attended(s, x)[:, 1:])
wrong(
    "TenPercentInBf16",
    WithoutCache,
    PRECISE,
    "in bf16",
    forward=lambda s, x: attended(s, x) * (1.1 if x.dtype == torch.bfloat16 else 1),
)


class NormalizesOnAverage(WithoutCache):
    """A running mean, which each call moves."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.hidden_size, affine=False)

    def forward(self, x_BSD):
        self.norm(x_BSD.flatten(0, 1))
        return self.inner(x_BSD) - self.norm.running_mean.to(x_BSD)


def routed_block(self, x_BSD):
    """Between segments, another micro-batch overwrites `kept`."""
    normal = self.norm(x_BSD)
    self.kept = x_BSD + self.attention(normal)
    return self.kept, *self.moe.route(normal)


def added(y_BSD, *parts):
    return y_BSD + torch.stack(parts).sum(0).view_as(y_BSD)


wrong("RunsAverage", NormalizesOnAverage, SHAPES, "with 1 sequence of 1 position")
wrong(
    "CutsOffTheResidual",
    ParallelBlock,
    TRAINED,
    "attention.qkv.weight gets no gradient (like 1 other weight), although",
    add=lambda s, y, *parts: added(y.detach(), *parts),
)
wrong(
    "KeepsItsAttention",
    ParallelBlock,
    FLIGHT,
    "overwrites them",
    route=routed_block,
    add=lambda s, y, *parts: added(s.kept.detach() + (y - y.detach()), *parts),
)


def by_status(report: Report, status: str) -> dict[str, str]:
    return {check.name: check.problem for check in report.checks if check.status == status}


def check(kind, layer, options="", **arguments) -> Report:
    return getattr(checks, f"check_{kind}")(layer, options, **arguments)


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_breaks_the_law_that_names_it(name):
    kind, layer, law, words = WRONG[name]
    failed = by_status(check(kind, layer), "failed")
    assert [*failed][:1] == [law] and words in failed[law], failed


def test_the_first_level_that_fails_is_the_last_that_runs():
    report = check("experts", WRONG["AllOrOne"][1])
    assert len(report.checks) == 1 and len(report.not_run) == 18
    assert str(report).splitlines()[-1] == "1 failed, 18 not run"


# ---- correct layers ----


class Shares(GELU):
    """All experts share a scale."""

    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def expert(self, e, rows):
        return super().expert(e, rows * self.scale)


class Scaled(WithoutCache):
    """With a parameter that is a single number."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x_BSD):
        return self.scale * super().forward(x_BSD)


class KeyBias(nn.Module):
    """The gradient of the bias of the keys is 0, apart from rounding."""

    def __init__(self, config):
        super().__init__()
        size, self.heads = config.hidden_size, config.num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x_BSD):
        q, k, v = (part(x_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Tied(GELU):
    """Two products with one weight."""

    def expert(self, e, rows):
        return super().expert(e, rows) + F.linear(F.linear(rows, self.up[e]), self.up[e].T)


class Hash(nn.Module):
    """Without parameters and gradients."""

    def __init__(self, config):
        super().__init__()
        self.experts, self.k = config.num_experts, config.experts_per_token

    def forward(self, x):
        first_T = (x.flatten(0, -2)[:, 0].float().abs() * 1000).long()
        ids = (first_T[:, None] + torch.arange(self.k, device=x.device)) % self.experts
        return torch.full(ids.shape, 1 / self.k, device=x.device), ids


class WithALoss(TopK):
    def forward(self, x):
        weights, ids = super().forward(x)
        return attach(weights, self.score(x).square().mean()), ids


class Skips(TopK):
    """Weights of id -1 depend on all tokens, without any effect."""

    def forward(self, x):
        weights, ids = super().forward(x)
        skipped = weights < 0.3
        return torch.where(skipped, weights.detach().mean(), weights), ids.masked_fill(skipped, -1)


class WithDropout(WithoutCache):
    def forward(self, x_BSD):
        return F.dropout(self.inner(x_BSD), 0.5, self.training)


class Running(special_experts.RunningExperts):
    """Without dropout, and it moves the mean after its use."""

    def forward(self, x_MD, expert_offsets):
        mean_ED = self.mean.repeat_interleave(expert_offsets.diff(), 0)
        if self.training:
            self.move([piece.detach() for piece in x_MD.split(expert_offsets.diff().tolist())])
        return grouped_linear(x_MD - mean_ED, self.up, expert_offsets)


NO_CHOICES, NO_MASK = {"choices of a row"}, {"document mask"}
CORRECT = [
    ("experts", "swiglu", set()), ("experts", GELU, NO_CHOICES), ("experts", Shares, NO_CHOICES),
    ("experts", Tied, NO_CHOICES), ("experts", own_layers.Expert, NO_CHOICES),
    ("experts", own_layers.VariedExpert, NO_CHOICES),
    ("experts", own_layers.expert_list, NO_CHOICES), ("experts", own_layers.swiglu_function, NO_CHOICES),
    ("experts", special_experts.DropoutExperts, set()), ("experts", Running, NO_CHOICES),
    ("experts", special_experts.RunningExperts, NO_CHOICES), ("router", "topk", set()),
    ("router", own_layers.PlainRouter, set()), ("router", TopK, set()), ("router", WithALoss, set()),
    ("router", Hash, {"split backward"}), ("router", Skips, set()), ("attention", "gqa", set()),
    ("attention", "mla", set()), ("attention", WithCache, set()), ("attention", WithoutCache, NO_MASK),
    ("attention", WithDropout, NO_MASK), ("attention", Scaled, NO_MASK),
    ("attention", KeyBias, NO_MASK), ("block", "prenorm", set()), ("block", ParallelBlock, NO_MASK),
    ("block", own_layers.PlainBlock, NO_MASK),
]  # fmt: skip


@pytest.mark.parametrize("kind,layer,skipped", CORRECT, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_correct_layer_breaks_no_law(kind, layer, skipped):
    report = check(kind, layer)
    assert report.passed and {*by_status(report, "skipped")} == skipped, str(report)
    assert {*by_status(report, "warning")} <= ({"no host sync"} if layer != "swiglu" else set()), str(report)


PUBLISHED = [
    *(("experts", name) for name in ["llama", "qwen3_moe", "deepseek_v3", "gemma2", "phi3", "nemotron"]),
    *(("router", name) for name in ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"]),
    *(("attention", name) for name in ["llama", "qwen3", "olmo2", "deepseek_v3"]),
    *(("block", name) for name in ["llama", "qwen3", "olmo2"]),
]


@pytest.mark.long
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("kind,model", PUBLISHED)
def test_layers_of_published_models_break_no_law(kind, model):
    from tests.support import published_layers

    layers = {"experts": published_layers.expert, "router": published_layers.Router}
    layers |= {"attention": published_layers.attention, "block": published_layers.block}
    report = check(kind, layers[kind], f"model={model}")
    assert report.passed, str(report)
    assert {*by_status(report, "warning")} <= {"no host sync", "precision"}, str(report)


# ---- warnings ----


class ExpertChoice(TopK):
    """Each expert takes the tokens that like it best: a token's experts depend on the others."""

    def forward(self, x):
        scores_TE = self.scores(x.flatten(0, -2))
        number = max(1, len(scores_TE) * self.k // scores_TE.shape[1])
        kept_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, scores_TE.topk(number, dim=0).indices, True)
        ids_TE = torch.arange(scores_TE.shape[1], device=x.device).expand_as(scores_TE)
        return scores_TE, ids_TE.masked_fill(~kept_TE, -1)


class InFp32(GELU):
    """Its results have the digits of fp64, but not its products."""

    def expert(self, e, rows):
        return F.linear(rows.float(), self.up[e].float()).to(rows) @ self.down[e].T * 1.0000001


class SkipsEmpty(nn.Module):
    def __init__(self, config, num_local_experts):
        super().__init__()
        self.each = nn.ModuleList(own_layers.Expert(config) for _ in range(num_local_experts))

    def forward(self, x_MD, expert_offsets):
        pieces = x_MD.split(expert_offsets.diff().tolist())
        return torch.cat(
            [x_MD[:0], *(expert(piece) for expert, piece in zip(self.each, pieces, strict=True) if len(piece))]
        )


@pytest.mark.parametrize("kind,layer,law,words", [
    ("router", ExpertChoice, ALONE, "depend on other tokens of the batch"),
    ("experts", InFp32, "precision", "computes in fp32 or less although its input is in fp64"),
    ("experts", SkipsEmpty, SIZES, "is None with [7, 0, 0, 0] rows per expert"),
    ("experts", GELU, "no host sync", "tolist() at tests/tools/checks/test_layers.py:"),
])  # fmt: skip
def test_what_is_not_wrong_everywhere_is_a_warning(kind, layer, law, words):
    report = check(kind, layer)
    assert report.passed and words in by_status(report, "warning")[law], str(report)


def test_other_sizes():
    config = dataclasses.replace(SMALL, num_experts=3, hidden_size=10)
    assert check("experts", GELU, config=config).passed
    assert DIVIDED in by_status(check("experts", WRONG["TakesTheNext"][1], config=config), "failed")


@pytest.mark.parametrize("kind,layer", [("router", "topk"), ("experts", "swiglu")])
def test_experts_in_groups(kind, layer):
    report = check(kind, layer, config=dataclasses.replace(SMALL, expert_groups=2, top_groups=1))
    assert report.passed, str(report)


# ---- the command ----


@pytest.mark.parametrize("words,code,shown", [
    (["experts", f"{own_layers.__file__}:VariedExpert", "--options", "widths=3,5"], 0, "17 checks passed, 1 warning"),
    (["experts", f"{__file__}:TakesTheNext", "--num-experts", "6"], 1, "differs by"),
    (["router", "topk", "--hidden-size", "10"], 0, "17 checks passed"),
    (["block", f"{own_layers.__file__}:PlainBlock", "--options", "factor=0.5"], 0, "18 checks passed, 1 skipped"),
    (["experts", f"{own_layers.__file__}:VariedExpert", "--options", "rank=2"], 2, "no option 'rank'; choose from"),
    (["router", "topk", "--num-experts", "0"], 2, "num_experts must be at least 1: got 0"),
    (["block", "no_such_module:X"], 2, "cannot import the block 'no_such_module:X'"),
], ids=["options", "broken", "router", "block", "own options", "sizes", "module"])  # fmt: skip
def test_the_exit_code_says_whether_a_check_failed(capsys, words, code, shown):
    assert main(["check", *words]) == code
    output = capsys.readouterr()
    assert shown in (output.err if code == 2 else output.out)
    assert code < 2 or (output.err.count("\n") == 1 and not output.out)


def test_with_traceback_an_exception_of_a_layer_shows_all_frames(capsys):
    words = ["check", "experts", f"{__file__}:NeedsARow"]
    assert main(words) == 1
    assert "Traceback" not in "".join(capsys.readouterr())
    assert main([*words, "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_both_overlapped_ways_are_compared(monkeypatch):
    calls = []
    for name in ("overlapped_forward_backward", "interleaved_forward"):
        method = getattr(Segmented, name)
        called = lambda *args, name=name, method=method: calls.append(name) or method(*args)  # noqa: E731
        monkeypatch.setattr(Segmented, name, staticmethod(called))
    assert check("router", "topk").passed
    assert calls == ["overlapped_forward_backward", "interleaved_forward"]
