"""The laws of a router (`RouterLayer` in models/router.py).

T tokens, K experts per token.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...messages import plural
from ...models.layers import seeded
from ...models.moe import MoE
from ...models.router import build_router
from . import shared_laws as shared
from .laws import Broken, Law, Suspect
from .pairs import Interleaved, compare_overlapped
from .subject import Outputs, Subject, prepare, relative

_SEQUENCES, _LENGTH = 4, 6


class Routers(Subject):
    """The router that `config` names."""

    def build(self, seed: int) -> nn.Module:
        with seeded(seed, "router"):
            return prepare(build_router(self.config, 0), seed, device=self.device)

    def draw(self, seed: int) -> Tensor:
        return self.random(seed, _SEQUENCES, _LENGTH)

    def examples(self) -> list[Tensor]:
        x = self.draw(1)
        return [x, x[0], x[:1, :1]]

    def row_name(self, row: Sequence[int]) -> str:
        return f"token {row[0] * _LENGTH + row[1] if len(row) == 2 else row[0]}"

    def call(self, module: Any, x: Tensor) -> Outputs:
        """Weights, ids, and the values of losses. Weights of id -1 become 0: they have no effect in a model."""
        weights, ids, *losses = _checked(module(x), x)
        return weights.masked_fill(ids < 0, 0.0), ids, *losses


def _checked(outputs: Any, x: Tensor) -> Outputs:
    """Raises Broken if shapes or dtypes are wrong, or a weight is not finite."""
    if not isinstance(outputs, tuple | list) or len(outputs) < 2:
        got = f"{len(outputs)} values" if isinstance(outputs, tuple | list) else type(outputs).__name__
        raise Broken(f"forward must return weights_TK and ids_TK: got {got}")
    weights, ids, tokens = outputs[0], outputs[1], x[..., 0].numel()
    if weights.ndim != 2 or weights.shape != ids.shape or len(weights) != tokens:
        raise Broken(
            f"for {tokens} tokens of shape {[*x.shape]}, weights and ids must both be [{tokens}, K]: got "
            f"{[*weights.shape]} and {[*ids.shape]}. Flatten x to tokens with `x.flatten(0, -2)`"
        )
    if ids.dtype != torch.int64:
        raise Broken(f"ids must be int64: got {ids.dtype}. Convert them with `ids.long()`")
    if weights.dtype not in (torch.float32, torch.float64):
        raise Broken(
            f"weights must be in fp32 or fp64: got {weights.dtype} for x in {x.dtype}. Compute them from "
            "`logits.float()`"
        )
    if (bad := ~weights.isfinite()).any():
        token = int(bad.any(1).nonzero()[0])
        raise Broken(
            f"a weight of token {token} is not finite, in {x.dtype}: {weights[token].tolist()}. The weight of id -1 "
            "must be finite, too: its gradient is 0, and 0 times infinity is NaN in backward"
        )
    return tuple(outputs)


def ids_are_valid(routers: Routers) -> str:
    ids = routers.run(routers.draw(1))[1]
    experts = routers.config.num_experts
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            if not -1 <= expert < experts:
                raise Broken(
                    f"token {token} chooses expert {expert}: ids are global, from 0 to {experts - 1}, or -1 for no "
                    "expert"
                )
        chosen = [expert for expert in row if expert >= 0]
        if len({*chosen}) < len(chosen):
            twice = next(expert for expert in chosen if chosen.count(expert) > 1)
            raise Broken(
                f"token {token} chooses expert {twice} more than once: {row}. Add up its weights, and use id -1 for "
                "the duplicates"
            )
    skipped = int((ids < 0).sum())
    if skipped and not getattr(routers.module, "skips_choices", True):
        raise Broken(f"{skipped} ids are -1, but skips_choices is False: set skips_choices = True")
    return f"{ids.numel() - skipped} choices of {plural(len(ids), 'token')}, {skipped} ids of -1"


def tokens_are_independent(routers: Routers) -> str:
    """A token gets the same experts and weights alone as in the batch."""
    x = routers.draw(1)
    weights, ids, *_ = routers.run(x)
    for token, row in enumerate(x.flatten(0, 1)):
        alone_weights, alone_ids, *_ = routers.run(row[None, None])
        width = min(ids.shape[1], alone_ids.shape[1])
        same = torch.equal(_chosen(ids[token]), _chosen(alone_ids[0]))
        error = relative(alone_weights[0, :width], weights[token, :width])
        if not same or error > routers.tolerance(weights):
            what = f"weights depend on other tokens of the batch: alone, those of token {token} change by {error:.1e}"
            if not same:
                experts, alone = ids[token].tolist(), alone_ids[0].tolist()
                what = f"choices depend on other tokens of the batch: token {token} gets {experts}, but {alone} alone"
            raise Suspect(
                f"{what}. So generation differs from training, because later tokens do not exist yet, and losses "
                "depend on the micro-batch size and the number of ranks"
            )
    return "each token is routed alone as in the batch"


def _chosen(ids_K: Tensor) -> Tensor:
    return ids_K[ids_K >= 0].sort().values


def _moe(routers: Routers) -> Any:
    config = dataclasses.replace(
        routers.config, router="topk", router_options="", experts="swiglu", expert_options="", num_shared_experts=0,
        sequence_loss=0.0, z_loss=0.0,
    )  # fmt: skip
    moe: Any = prepare(MoE(config, Interleaved(config.num_experts), 0), device=routers.device)
    moe.router = routers.module
    return moe.train(routers.module.training)


def router_laws() -> list[Law]:
    own = [
        Law("ids valid", ids_are_valid),
        Law("tokens independent", tokens_are_independent, ["ids valid"]),
    ]

    def overlapped(routers: Routers) -> str:
        return compare_overlapped(_moe(routers), routers.draw(5), routers.draw(6), "router.")

    return shared.laws("weights and ids", own, Law(shared.OVERLAPPED, overlapped, ["ids valid", shared.SPLIT]))
