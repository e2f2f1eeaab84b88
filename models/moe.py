"""The Mixture-of-Experts layer: route, dispatch, experts, combine, and shared experts.

T tokens, D model dim, K experts per token, N received rows, M rows in expert-major order.
"""

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import Combined, ExpertParallel, Pending, Received, Route
from moe_dualpipe.expert_parallel.labels import COMBINE, DISPATCH
from moe_dualpipe.expert_parallel.slots import Slots, find_slots
from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.kernels.fuse import fuse
from moe_dualpipe.kernels.permute import permute, unpermute
from moe_dualpipe.overlap import Collective, Comm, Compute, PrepareComm, Segmented, Segments

from .attention import attention_costs
from .build_experts import ExpertBuilder
from .config import DEFAULT_OPTIONS, ModelConfig, StageOptions
from .context_parallel import transfers_at_first
from .custom_layers import custom_source
from .layer_calls import call_layer, call_router
from .layers import Linear, SwiGLU
from .recompute import RecomputeTensor, recompute_saved
from .router import build_router


class MoE(Segmented):
    """Routed experts of block `layer`, spread over ranks by `expert_parallel`, plus shared experts on every rank.

    The initial weights of an expert depend only on `layer`, its id and the seed, not on its rank.
    `load_E` counts the tokens of each expert since the last `take_load`: in training, or if `counts_all`, also without
    gradients. `slots` has the ids by which `expert_parallel` knows the experts; None: their own ids.

    For the R sequences of a step, with S positions: training writes the routes `recorded_RSK`, and takes those of
    `replayed_RSK` that are not -1. `weights_RS`, `documents_RS`: see `RouterLayer`. Tokens with weight 0 go to no
    expert.
    """

    compiled: bool = False
    counts_all: bool = False
    load_E: Tensor
    slots: Slots | None = None
    recorded_RSK: Tensor | None = None
    replayed_RSK: Tensor | None = None
    weights_RS: Tensor | None = None
    documents_RS: Tensor | None = None
    router: Any

    def __init__(
        self, config: ModelConfig, expert_parallel: ExpertParallel, layer: int, options: StageOptions = DEFAULT_OPTIONS
    ):
        super().__init__()
        self.recompute = options.recompute == "full"
        self.expert_parallel, self.layer = expert_parallel, layer
        self.kernels: Kernels = options.kernels
        self.router = build_router(config, layer, self.kernels)
        self.router.context = self.context = options.context
        ep, cp = config.num_experts // len(expert_parallel.local_experts), self.context.size if self.context else 1
        keys = math.prod(attention_costs(config).kv_cache_shape(config))
        self.opens = transfers_at_first(cp, keys, config.hidden_size, config.experts_per_token, ep)
        self.register_buffer("load_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        self._losses: tuple[Tensor | float, int] = 0.0, 0  # the sum of the losses [L], and the number of batches
        self.experts = ExpertBuilder(config, layer, options.seed).build(expert_parallel.local_experts)
        forward_of = next(each for each in type(self.experts).__mro__ if "forward" in vars(each))
        if options.fp8 is not None and "fp8" not in vars(forward_of):
            raise ValueError(
                f"the expert layer {config.experts!r} cannot compute in FP8: define `fp8 = None` in "
                f"{forward_of.__name__}, to which the model assigns an Fp8Recipe, and pass it to `experts`; or use "
                "compute.fp8=off"
            )
        for name in ("kernels", "num_sms", "fp8"):
            if hasattr(self.experts, name):
                setattr(self.experts, name, getattr(options, name))
        self.shared = None
        if config.num_shared_experts:
            inner = config.num_shared_experts * config.expert_size
            self.shared = SwiGLU(config.hidden_size, inner, config.init_std, config.residual_std)
        self.shared_gate = Linear(config.hidden_size, 1, config.init_std) if config.shared_gate else None
        self.elementwise = ("shared_gate.weight",) if config.shared_gate else ()

    def segments(self, x: Tensor, rows_B: Tensor | None = None) -> Segments:
        route, source = partial(self.route, rows_B=rows_B), custom_source(self.router)
        x_TD, *decision = yield Compute("attn", route, x, source=source)
        parts = yield from self.exchange(x_TD, *decision)
        return (yield Compute("add", lambda *parts: functools.reduce(torch.add, parts).view(x.shape), *parts))

    def route(self, x: Tensor, rows_B: Tensor | None = None) -> tuple[Tensor, ...]:
        """The tokens [T, D] of `x`, and the outputs of the router for them.

        rows_B: the numbers in the step of the sequences of `x` [B, S, D]. Without them, routes are neither recorded nor
        replayed. Raises ValueError if they are missing and the step has padding.
        """
        if rows_B is None and self.weights_RS is not None:
            raise ValueError(
                "this batch has padding or documents, which must not count as tokens of experts or as one sequence: "
                "add the parameter rows_B to `segments` of the block, and pass it to MoE.route"
            )
        of_step = self.replayed_RSK, self.weights_RS, self.documents_RS
        replay, weights_BS, documents_BS = (
            None if rows_B is None or all_ is None else all_[rows_B] for all_ in of_step
        )
        self.router.weights_BS, self.router.documents_BS = weights_BS, documents_BS
        replayed = () if replay is None else (replay.flatten(0, 1),)
        weights_TK, ids_TK, *losses = call_router(self.router, x, self.expert_parallel.num_experts, *replayed)
        self.router.weights_BS = self.router.documents_BS = None
        if rows_B is not None and self.recorded_RSK is not None:
            self.recorded_RSK[rows_B] = ids_TK.unflatten(0, x.shape[:2])
        if weights_BS is not None:
            ids_TK = ids_TK.masked_fill(weights_BS.reshape(-1, 1) == 0, -1)
        return x.flatten(0, -2), weights_TK, ids_TK, *losses

    def exchange(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, losses_L: Tensor | None = None,
        recompute_x: RecomputeTensor | None = None,
    ) -> Segments:  # fmt: skip
        """Dispatch, experts and combine. Returns the outputs of routed and of shared experts, each [T, D], to add up.

        losses_L: the router's losses, to record. recompute_x: computes `x_TD` in backward, instead of saving it.
        """
        ep = self.expert_parallel
        if torch.is_grad_enabled() or self.counts_all:
            self.count(ids_TK, losses_L)
        route = yield PrepareComm(DISPATCH, self.prepare, ids_TK)
        dispatch = dispatch_on(ep, route)
        received = yield Comm(DISPATCH, dispatch, x_TD, weights_TK)
        # Shared experts need no data from other ranks: they hide the dispatch.
        shared = None
        if self.shared is not None:
            shared = yield Compute("mlp", partial(self.run_shared, recompute_x), x_TD, recompute=self.recompute)
        run, source = partial(self.run_experts, route=route), custom_source(self.experts)
        out_ND = yield Compute("mlp", run, received, recompute=self.recompute, source=source)
        combined = yield Comm(COMBINE, dispatch.transposed, out_ND, hide="", opens=self.opens)
        return (combined,) if shared is None else (combined, shared)

    def prepare(self, ids_TK: Tensor) -> Route:
        return self.expert_parallel.prepare(ids_TK if self.slots is None else self.slots.of(ids_TK))

    def place(self, experts: Sequence[int]) -> None:
        """Say which expert is in each slot of all ranks (`find_slots`). The weights must be moved as well."""
        self.slots = find_slots(experts, self.expert_parallel.local_experts, self.load_E.device)

    def count(self, ids_TK: Tensor, losses_L: Tensor | None = None) -> None:
        """Add a batch to the load and the losses. Call it once per batch, even if routing is recomputed in backward."""
        ids = ids_TK.flatten()
        self.load_E.scatter_add_(0, ids.clamp(min=0), (ids >= 0).long())  # -1 chooses no expert
        if losses_L is not None:
            total, batches = self._losses
            self._losses = total + losses_L, batches + 1

    def take_load(self) -> Tensor:
        """Return the number of this rank's tokens per expert [E] since the last call, and reset it."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E

    def take_losses(self) -> tuple[Tensor | float, int]:
        """Return the sum of the losses [L], without their factors, and the number of batches, since the last call."""
        losses, self._losses = self._losses, (0.0, 0)
        return losses

    def run_shared(self, recompute_x: RecomputeTensor | None, x_TD: Tensor) -> Tensor:
        assert self.shared is not None
        with recompute_saved(x_TD, recompute_x):
            y_TD = self.shared(x_TD)
            return y_TD if self.shared_gate is None else fuse(gated, self.compiled)(self.shared_gate(x_TD), y_TD)

    def run_experts(self, x_ND: Tensor, weights_NK: Tensor, route: Route) -> Tensor:
        """The weighted sum of the outputs of this rank's experts for each received row, [N, D]."""
        order = route.order
        if getattr(self.experts, "takes_order", False):
            return call_layer("experts", self.experts, x_ND, order, weights_NK)
        skips = self.weights_RS is not None or getattr(self.router, "skips_choices", True)
        if not route.exact and (route.padded or skips):
            order = order.trimmed()  # a host sync; other layers may assume that the last offset is the number of rows
        rows_MD = permute(x_ND, order, self.kernels)
        out_MD = call_layer("experts", self.experts, rows_MD, order.expert_offsets)
        return unpermute(out_MD, order, weights_NK, self.kernels)


def gated(logits_T1: Tensor, y_TD: Tensor) -> Tensor:
    return logits_T1.sigmoid() * y_TD


def dispatch_on(ep: ExpertParallel, route: Route) -> Collective:
    """Dispatch on `route`; its dual is combine."""
    spread = len(ep.local_experts) < ep.num_experts
    return Collective(partial(_dispatch, ep, route), partial(_combine, ep, route), joint=spread)


def _dispatch(ep: ExpertParallel, route: Route, x_TD: Tensor, w_TK: Tensor | None = None) -> Pending[Received]:
    return ep.dispatch(x_TD, route, w_TK)


def _combine(ep: ExpertParallel, route: Route, y_ND: Tensor, grads_NK: Tensor | None = None) -> Pending[Combined]:
    return ep.combine(y_ND, route, grads_NK)


def expert_loads(module: nn.Module) -> Tensor | None:
    """Tokens of this rank per expert since the last call, [MoE layers, E]. None for a module without MoE layers."""
    loads = [layer.take_load() for layer in module.modules() if isinstance(layer, MoE)]
    return torch.stack(loads) if loads else None
