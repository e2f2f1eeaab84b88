# ruff: noqa: ARG005 - methods that ignore an argument
"""The laws of layers: each wrong layer breaks the law that names its mistake, and correct layers break none."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from moe_dualpipe.cli import main
from moe_dualpipe.models.attention import Attention as BuiltIn
from moe_dualpipe.tools import checks
from moe_dualpipe.tools.checks import Report, layers
from moe_dualpipe.tools.checks.layers import SMALL
from tests.support import own_layers, special_experts
from tests.support.own_layers import ParallelBlock, WithCache, WithoutCache


def by_status(report: Report, status: str) -> dict[str, str]:
    return {check.name: check.problem for check in report.checks if check.status == status}


def check(kind, layer, options="", **sizes) -> Report:
    return getattr(checks, f"check_{kind}")(layer, options, dataclasses.replace(SMALL, **sizes))


# ---- correct layers ----


class GELU(nn.Module):
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


class Shares(GELU):
    """All experts share a scale."""

    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def expert(self, e, rows):
        return super().expert(e, rows * self.scale)


class TopK(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.k, self.experts = config.experts_per_token, config.num_experts
        self.score = nn.Linear(config.hidden_size, config.num_experts)

    def forward(self, x):
        return self.scores(x.flatten(0, -2)).topk(self.k)

    def scores(self, x_TD):
        logits_TE = self.score(x_TD)
        return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).softmax(-1)


class Skips(TopK):
    """Weights of id -1 depend on all tokens, without any effect."""

    def forward(self, x):
        weights, ids = super().forward(x)
        skipped = weights < 0.3
        return torch.where(skipped, weights.detach().mean(), weights), ids.masked_fill(skipped, -1)


class Scaled(WithoutCache):
    """The scale is a single number."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x_BSD):
        return self.scale * super().forward(x_BSD)


NO_CHOICES, NO_MASK, NO_CONTEXT = {"choices of a row"}, {"document mask"}, {"context parallelism"}
ONE_EXPERT, MANY_EXPERTS = {"num_experts": 1, "experts_per_token": 1}, {"num_experts": 20}
GROUPS = {"expert_groups": 2, "top_groups": 1}
CORRECT = [
    ("experts", "swiglu", GROUPS, set()), ("experts", GELU, {"num_experts": 3, "hidden_size": 10}, NO_CHOICES),
    ("experts", Shares, {}, NO_CHOICES), ("experts", own_layers.swiglu_function, {}, NO_CHOICES),
    ("experts", special_experts.DropoutExperts, {}, set()), ("experts", special_experts.ScaledExperts, {}, NO_CHOICES),
    ("router", "topk", GROUPS, set()), ("router", "topk", ONE_EXPERT, set()),
    ("router", own_layers.PlainRouter, {}, set()), ("router", Skips, {}, set()), ("attention", "gqa", {}, set()),
    ("attention", "mla", {}, set()), ("attention", Scaled, {}, NO_MASK | NO_CONTEXT),
    ("block", "prenorm", MANY_EXPERTS, set()), ("block", "prenorm", ONE_EXPERT, set()),
    ("block", own_layers.PlainBlock, {}, NO_MASK),
]  # fmt: skip


@pytest.mark.parametrize("kind,layer,sizes,skipped", CORRECT, ids=[
    f"{kind} {getattr(layer, '__name__', layer)} {sizes.get('num_experts', 4)}" for kind, layer, sizes, _ in CORRECT
])  # fmt: skip
@pytest.mark.quick(
    "experts swiglu 4", "experts Shares 4", "experts DropoutExperts 4", "experts ScaledExperts 4", "router topk 1",
    "router Skips 4", "attention gqa 4", "attention Scaled 4", "block prenorm 20",
)  # fmt: skip
def test_a_correct_layer_breaks_no_law(kind, layer, sizes, skipped):
    report = check(kind, layer, **sizes)
    assert report.passed and {*by_status(report, "skipped")} == skipped, str(report)
    assert {*by_status(report, "warning")} <= ({"no host sync"} if layer != "swiglu" else set()), str(report)


# ---- parts of wrong layers ----

plain, mlp, routed, attended = GELU.forward, GELU.expert, TopK.forward, WithoutCache.forward


def doubled(weight):
    """The weight, whose gradient becomes twice as large."""
    return 2 * weight - weight.detach()


def with_hook(y, hook):
    """The same values. The hook gets their gradient, and may return another one."""
    y = y.view_as(y)
    if y.requires_grad:
        y.register_hook(hook)
    return y


def squared(x, layer):
    """x * x. Its gradient needs x, which is kept in the layer."""
    layer.kept = x.detach()
    return (x * x).detach() + with_hook(x, lambda grad: 2 * grad * layer.kept) - x.detach()


class DefersTwice(nn.Module):
    """The gradient of the weight is deferred, and also returned."""

    weight_grads = None

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.hidden_size))

    def forward(self, rows):
        return with_hook(rows * self.weight, lambda grad: self.defer((rows.detach() * grad).sum(0)))

    def defer(self, grad):
        if self.weight_grads is not None and self.weight_grads.defers(self.weight):
            self.weight_grads.defer(self.weight, lambda: grad)


def made(base, **tensors):
    """A constructor that adds tensors: each from the config and the layer."""

    def build(self, config, *number):
        base.__init__(self, config, *number)
        for name, make in tensors.items():
            setattr(self, name, make(config, self))

    return build


class TooFew(GELU):
    def __init__(self, config, num_local_experts):
        if num_local_experts < config.num_experts:
            raise RuntimeError(f"no {num_local_experts} experts")
        super().__init__(config, num_local_experts)


class Counts(GELU):
    calls = 0

    def forward(self, x_MD, expert_offsets):
        self.calls += 1
        return plain(self, x_MD, expert_offsets) / self.calls


class RunningMean(TopK):
    """Chooses by a mean of earlier scores."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.num_experts))

    def forward(self, x):
        scores_TE = self.scores(x.flatten(0, -2))
        if self.training:
            self.mean = self.mean.lerp(scores_TE.detach().mean(0).to(self.mean), 0.1)
        ids_TK = (scores_TE - self.mean).topk(self.k).indices
        return scores_TE.gather(1, ids_TK), ids_TK


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


class NeedsARow(GELU):
    def expert(self, e, rows):
        return mlp(self, e, rows) * (1 + 0 * rows.max())


class TakesTheNext(GELU):
    def expert(self, e, rows):
        return mlp(self, (e + 1) % self.num_experts, rows)


def in_bf16_sums(rows, weight_FD):
    """A product whose sum is rounded to bf16 after each 4 terms."""
    y = rows.new_zeros(len(rows), len(weight_FD))
    for x, w in zip(rows.split(4, 1), weight_FD.split(4, 1), strict=True):
        y = y + F.linear(x, w)
    return y


def summed_over_ranks(self, x_MD, expert_offsets):
    y_MD = plain(self, x_MD, expert_offsets)
    if dist.is_initialized():
        dist.all_reduce(y_MD.detach().mean(0))
    return y_MD


class Ordered(GELU):
    takes_order = True
    scaled: Any

    def forward(self, x_ND, order, weights_NK):
        y_MD = plain(self, x_ND[order.gather_idx_M], order.expert_offsets) * self.scaled(weights_NK, order)
        return torch.zeros_like(x_ND).index_add(0, order.gather_idx_M, y_MD.to(x_ND)) + 0 * weights_NK.sum().to(x_ND)


def rows_below(number, rows):
    return (torch.arange(len(rows)) < number)[:, None]


def softmax_without_maximum(self, e, rows):
    gate = F.linear(rows, self.up[e]).exp()
    return mlp(self, e, rows) * (gate / (1 + gate)).mean(-1, True)


def routed_block(self, x_BSD):
    """Between segments, another micro-batch overwrites `kept`."""
    normal = self.norm(x_BSD)
    self.kept = x_BSD + self.attention(normal)
    return self.kept, *self.moe.route(normal)


def added_to_kept(self, y_BSD, *parts):
    return self.kept.detach() + (y_BSD - y_BSD.detach()) + torch.stack(parts).sum(0).view_as(y_BSD)


# ---- each mistake ----

SHAPES, STATE, ALONE, SIZES = "shapes and dtypes", "no state", "rows independent", "any number of rows"
PRECISE, LARGE, GRADIENTS, FLIGHT = "precision", "large values", "gradients", "overlapped equals sequential"
CHOICES, DIVIDED, LAYOUT = "choices of a row", "any ep equals ep=1", "any memory layout"
DRAWN = {"reset_expert": lambda s, e: [nn.init.normal_(p[e], std=0.3) for p in s.parameters()]}  # any shape is built
WRONG = {
    # experts
    "too few": (TooFew, "constructor", "RuntimeError: no 1 experts", {}),
    "a tuple": (GELU, SHAPES, "got a tuple of 2", {"forward": lambda *a: (plain(*a), None)}),
    "fp32 results": (GELU, SHAPES, "in float64 on cpu: got [14, 16] in float32",
                     {"forward": lambda *a: plain(*a).float()}),
    "fp32 only": (GELU, SHAPES, "expected m1 and m2 to have the same dtype",
                  {"expert": lambda s, e, r: mlp(s, e, r.float()).to(r)}),
    "overflow": (GELU, SHAPES, "in torch.float32, the result has NaN or infinity at row 0 of expert 0",
                 {"forward": lambda *a: plain(*a) * 1e60 / 1e60}),
    "needs a row": (NeedsARow, SHAPES, "rows per expert)", {}),
    "writes its input": (GELU, STATE, "or change `x.data`", {"forward": lambda s, x, o: plain(s, x.data.mul_(2), o)}),
    "noise": (GELU, STATE, "in eval mode, too", {"expert": lambda s, e, r: mlp(s, e, r) + torch.randn_like(r)}),
    "a running mean": (RunningMean, STATE, "forward changes mean: replicas of the layer see other tokens", {}),
    "counts calls": (Counts, STATE, "in a second call with the same input", {}),
    "stale offsets": (StaleOffsets, STATE, "after a call with another input", {}),
    "leak in training": (LeaksInTraining, ALONE, "in training mode, the result of row", {}),
    "mixes in eval": (GELU, ALONE, "in eval mode, the result of row",
                      {"forward": lambda s, x, o: plain(s, x, o) + 0.01 * (not s.training) * x.mean(0)}),
    "wrong above 64": (GELU, SIZES, "row 64 of expert 3 differs",
                       {"expert": lambda s, e, r: mlp(s, e, r) * rows_below(64, r)}),
    "wrong above 1000": (GELU, SIZES, "[127, 128, 129, 700] rows",
                         {"forward": lambda s, x, o: plain(s, x, o) * (1 - 0.1 * (len(x) > 1000))}),
    "wrong at 129": (GELU, SIZES, "row 128 of expert 2",
                     {"expert": lambda s, e, r: mlp(s, e, r) * rows_below(128 if len(r) == 129 else 999, r)}),
    "wrong above 16 experts": (GELU, DIVIDED, "of expert 16 differs",
                               {"expert": lambda s, e, r: mlp(s, min(e, 15), r)}),
    "NaN if empty": (GELU, SHAPES, "the gradient of up of expert",
                     {"expert": lambda s, e, r: mlp(s, e, r) + 0 * s.up[e].sum() / len(r)}),
    "5% off": (GELU, PRECISE, "in bf16, the result differs by",
               {"expert": lambda s, e, r: mlp(s, e, r) * (1.05 if r.dtype == torch.bfloat16 else 1)}),
    "sums in bf16": (GELU, PRECISE, "in bf16, the result differs by",
                     {"expert": lambda s, e, r: in_bf16_sums(F.gelu(in_bf16_sums(r, s.up[e])), s.down[e])}),
    "exp overflows": (GELU, LARGE, "Inputs are 1,000 times as large", {"expert": softmax_without_maximum}),
    "row-major": (GELU, LAYOUT, "view size is not compatible",
                  {"forward": lambda s, x, o: plain(s, x.view(-1).view_as(x), o)}),
    "dense gradient": (GELU, LAYOUT, "view size", {
        "forward": lambda s, x, o: with_hook(plain(s, x, o), lambda grad: grad.view(-1).view(grad.shape))}),
    "unused": (GELU, GRADIENTS, "of expert 3 is 0 (like 1 other one): the result does not depend on it",
               {"expert": lambda s, e, r: mlp(s, e, r) * (e < 3 or s.is_part)}),
    "cut off": (GELU, GRADIENTS, "the gradient of down of expert 0 is wrong: in a random direction, finite",
                {"expert": lambda s, e, r: F.linear(F.gelu(F.linear(r, s.up[e])), s.down[e].detach())}),
    "doubled": (GELU, GRADIENTS, "the gradient of down of expert 0 is wrong",
                {"expert": lambda s, e, r: F.linear(F.gelu(F.linear(r, s.up[e])), doubled(s.down[e]))}),
    "input cut off": (GELU, GRADIENTS, "it is None. Autograd is cut off",
                      {"forward": lambda s, x, o: plain(s, x.detach(), o)}),
    "the next expert": (TakesTheNext, DIVIDED, "over 2 ranks", {}),
    "doubled in parts": (GELU, DIVIDED, "down of expert 0 differs by 1.0e+00 (about 2 times",
                         {"expert": lambda s, e, r: F.linear(
                             F.gelu(F.linear(r, s.up[e])), doubled(s.down[e]) if s.is_part else s.down[e])}),
    "bias on ranks": (GELU, DIVIDED, "bias.0 in a checkpoint is new over 2 ranks",
                      DRAWN | {"__init__": made(GELU, bias=lambda c, s: nn.Parameter(
                          torch.zeros(s.num_experts, c.hidden_size)) if s.is_part else None)}),
    "plain tensor": (GELU, "saved and loaded", "not in its state_dict()", {
        "__init__": made(GELU, scale=lambda c, _: 1 + torch.rand(c.hidden_size)),
        "expert": lambda s, e, r: mlp(s, e, r) * s.scale.to(r)}),
    "keeps": (GELU, FLIGHT, "keeps tensors for later in `self`", {
        "forward": lambda s, x, o: plain(s, squared(x, s), o)}),
    "defers twice": (DefersTwice, "split backward", "(about 2 times as large) if weight gradients", {}),
    "sums": (GELU, "no collectives", "first allreduce, float64[16]", {"forward": summed_over_ranks}),
    "ignores weights": (Ordered, CHOICES, "differs by", {"scaled": lambda s, w, o: 1}),
    "detaches weights": (Ordered, CHOICES, "the gradient of weights_NK differs by 1.0e+00",
                         {"scaled": lambda s, w, o: w.detach().flatten()[o.choice_idx_M, None]}),
    # routers
    "only ids": (TopK, SHAPES, "must return weights and expert ids, both [24, K]: got",
                 {"forward": lambda s, x: routed(s, x)[1]}),
    "bf16 weights": (TopK, SHAPES, "must return weights in float32 or float64 on cpu: got",
                     {"scores": lambda s, x: s.score(x).softmax(-1)}),
    "int32 ids": (TopK, SHAPES, "must return expert ids in int64 on cpu: got",
                  {"forward": lambda s, x: (routed(s, x)[0], routed(s, x)[1].int())}),
    "sequences": (TopK, SHAPES, "both [24, K]: got [2, 12, 2]",
                  {"forward": lambda s, x: s.scores(x).topk(s.k)}),
    "ids from 1": (TopK, SHAPES, "must return expert ids from 0 to 3",
                   {"forward": lambda s, x: (routed(s, x)[0], routed(s, x)[1] + 1)}),
    "twice": (TopK, SHAPES, "must return different experts for each token",
              {"forward": lambda s, x: (routed(s, x)[0], routed(s, x)[1][:, :1].expand(-1, s.k))}),
    "hidden skips": (Skips, SHAPES, "skips_choices is False", {"skips_choices": False}),
    "infinite skips": (TopK, SHAPES, "Weights are finite, also those of id -1",
                       {"forward": lambda s, x: (routed(s, x)[0] / 0, routed(s, x)[1])}),
    "straight": (TopK, GRADIENTS, "the gradient of the input is wrong",
                 {"scores": lambda s, x: (p := TopK.scores(s, x)) + ((s.score(x) / 2).softmax(-1) - p).detach()}),
    # attention and blocks
    "the future": (WithoutCache, ALONE, "mask later positions",
                   {"forward": lambda s, x: attended(s, x) + x.sum(1, True)}),
    "the length": (WithoutCache, "generation", "in generation, after 3,",
                   {"forward": lambda s, x: attended(s, x) / x.shape[1]}),
    "few sequences": (WithoutCache, SIZES, "sequence 64 differs",
                      {"forward": lambda s, x: attended(s, x) * (torch.arange(len(x)) < 64)[:, None, None]}),
    "forgets the past": (WithCache, "generation", "Append the new keys",
                         {"forward": lambda s, x, cache=None: s.inner(x)}),
    "ignores the mask": (WithCache, "document mask", "the mask mask_B1SS is not used",
                         {"forward": lambda s, x, mask_B1SS=None, cache=None: s.inner(x, cache)}),
    "masks both ways": (WithCache, "document mask", "with a mask of one document",
                        {"forward": lambda s, x, mask_B1SS=None, cache=None: s.inner(
                            x, cache, None if mask_B1SS is None else mask_B1SS | mask_B1SS.mT)}),
    "gathers in another order": (BuiltIn, "context parallelism", "with --cp 2, from the result",
                                 {"attend": lambda s, q, k, v: BuiltIn.attend(s, q, k.flip(2), v.flip(2))}),
    "drops a position": (WithoutCache, SHAPES, "got [3, 7, 16]", {"forward": lambda s, x: attended(s, x)[:, 1:]}),
    "keeps its attention": (ParallelBlock, FLIGHT, "overwrites them", {"route": routed_block, "add": added_to_kept}),
}  # fmt: skip
"""A class, the law that its mistake breaks, words of the message, and other methods of the class."""
KINDS = {"router": TopK, "attention": (WithoutCache, BuiltIn), "block": ParallelBlock}
SLOW = {
    "wrong at 129", "5% off", "row-major", "unused", "doubled", "doubled in parts", "input cut off", "the next expert",
    "bias on ranks", "ignores weights", "the length", "ignores the mask", "keeps its attention", "straight",
    "few sequences",
}  # fmt: skip
"""Mistakes that take long to find, each beside another one that breaks the same law."""


@pytest.mark.parametrize("base,law,words,methods", WRONG.values(), ids=WRONG)
@pytest.mark.quick(*(WRONG.keys() - SLOW))
def test_each_mistake_breaks_the_law_that_names_it(base, law, words, methods, monkeypatch):
    monkeypatch.setattr(layers, "LAWS", [[one] for level in layers.LAWS for one in level])  # ends with the first
    kind = next((kind for kind, of in KINDS.items() if issubclass(base, of)), "experts")
    report = check(kind, type("Wrong", (base,), {"__module__": __name__, **methods}))
    failed = by_status(report, "failed")
    assert [*failed][:1] == [law] and words in failed[law], failed
    assert law != "constructor" or (len(report.checks) == 1 and len(report.not_run) == 15)  # one line


# ---- warnings ----


class InFp32(GELU):
    """Its results have the digits of fp64, but not its products."""

    def expert(self, e, rows):
        return F.linear(rows.float(), self.up[e].float()).to(rows) @ self.down[e].T * 1.0000001


class SkipsEmpty(nn.Module):
    def __init__(self, config, num_local_experts):
        super().__init__()
        self.each = own_layers.expert_list(config, num_local_experts)

    def forward(self, x_MD, expert_offsets):
        pieces = x_MD.split(expert_offsets.diff().tolist())
        used = [expert(piece) for expert, piece in zip(self.each, pieces, strict=True) if len(piece)]
        return torch.cat([x_MD[:0], *used])


@pytest.mark.parametrize("layer,warnings", [
    (InFp32, {"precision": "computes in fp32 or less although its input is in fp64"}),
    (SkipsEmpty, {SIZES: "is None with [7, 0, 0, 0] rows per expert",
                  "no host sync": "tolist() at tests/tools/checks/test_layers.py:"}),
])  # fmt: skip
def test_what_is_not_wrong_everywhere_is_a_warning(layer, warnings):
    report = check("experts", layer)
    assert report.passed
    for law, words in warnings.items():
        assert words in by_status(report, "warning")[law], str(report)


# ---- the command ----


@pytest.mark.parametrize("words,code,shown", [
    (["block", f"{own_layers.__file__}:PlainBlock", "--options", "factor=0.5"], 0, "15 passed, 1 skipped"),
    (["experts", f"{__file__}:NeedsARow", "--num-experts", "6"], 1, "NeedsARow.expert"),
    (["experts", f"{__file__}:NeedsARow", "--traceback"], 1, "Traceback"),
    (["experts", f"{own_layers.__file__}:VariedExpert", "--options", "rank=2"], 2, "no option 'rank'; choose from"),
    (["router", "topk", "--num-experts", "0"], 2, "num_experts must be at least 1: got 0"),
    (["block", "no_such_module:X"], 2, "cannot import the block 'no_such_module:X'"),
])  # fmt: skip
def test_the_exit_code_says_whether_a_check_failed(capsys, words, code, shown):
    assert main(["check", *words]) == code
    output = capsys.readouterr()
    assert shown in output.out + output.err
    assert code < 2 or (output.err.count("\n") == 1 and not output.out)
