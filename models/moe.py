"""The Mixture-of-Experts layer: route, dispatch, experts, combine, and the shared expert beside them.

T tokens, D model dim, K experts per token, N received rows, M rows in expert-major order.
"""

import functools
from functools import partial

import torch
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import Combined, ExpertParallel, Pending, Received, Route
from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.kernels.permute import permute, unpermute
from moe_dualpipe.overlap import Comm, Compute, PrepareComm, Segmented, Segments
from moe_dualpipe.overlap.labels import COMBINE, DISPATCH

from .config import ModelConfig
from .experts import expert_class
from .layers import SwiGLU
from .recompute import Again, forgetting
from .router import Router
from .seeding import seeded


class MoE(Segmented):
    """Routed experts, spread over ranks by `expert_parallel`, plus shared experts on every rank.

    `seed` and `name` fix the initial weights of each expert, wherever it lives. `recompute`: run the experts again in
    the backward instead of keeping what they save. `kernels`: Triton or plain torch (kernels/backend.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        expert_parallel: ExpertParallel,
        seed: int,
        name: str,
        recompute: bool = False,
        kernels: Kernels = "auto",
    ):
        super().__init__()
        self.recompute = recompute
        self.expert_parallel = expert_parallel
        self.kernels: Kernels = kernels
        self.router = Router(config, kernels)
        local = expert_parallel.local_experts
        with seeded(seed, f"{name}.experts.{local.start}"):
            self.experts = expert_class(config.experts)(config, len(local))
        setattr(self.experts, "local_experts", local)  # noqa: B010 - read by expert_parallel/parameters.py
        if hasattr(self.experts, "kernels"):
            setattr(self.experts, "kernels", kernels)  # noqa: B010 - nn.Module declares no such attribute
        if reset := getattr(self.experts, "reset_expert", None):
            for e, expert in enumerate(local):
                with seeded(seed, f"{name}.experts.{expert}"):
                    reset(e)
        self.shared = None
        if config.num_shared_experts:
            inner = config.num_shared_experts * config.expert_size
            self.shared = SwiGLU(config.hidden_size, inner, config.init_std, config.residual_std)

    def segments(self, x: Tensor) -> Segments:
        x_TD, *decision = yield Compute("attn", self.route, x)
        parts = yield from self.exchange(x_TD, *decision)
        return (yield Compute("add", lambda *parts: functools.reduce(torch.add, parts).view(x.shape), *parts))

    def route(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tokens [T, D] of `x`, and what the router decides of them."""
        return x.flatten(0, -2), *self.router(x)

    def exchange(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        losses_L: Tensor | None = None,
        make_x: Again | None = None,
    ) -> Segments:
        """From routing decisions to what is to be added up for each token: experts [T, D], shared experts [T, D].

        `losses_L` are the router's, to be recorded. `make_x` makes the values of `x_TD` again, so that they need not be
        kept for the backward.
        """
        ep = self.expert_parallel
        if torch.is_grad_enabled():
            self.router.count(ids_TK, losses_L)
        route = yield PrepareComm(DISPATCH, ep.prepare, ids_TK)
        received = yield Comm(DISPATCH, partial(send, ep, route), partial(bring, ep, route), x_TD, weights_TK)
        # The shared experts know all they need: they hide the dispatch.
        shared = None
        if self.shared is not None:
            shared = yield Compute("mlp", partial(self.run_shared, make_x), x_TD, recompute=self.recompute)
        out_ND = yield Compute("mlp", partial(self.run_experts, route=route), received, recompute=self.recompute)
        combined = yield Comm(COMBINE, partial(bring, ep, route), partial(send, ep, route), out_ND, weights_first=True)
        return (combined,) if shared is None else (combined, shared)

    def run_shared(self, make_x: Again | None, x_TD: Tensor) -> Tensor:
        assert self.shared is not None
        with forgetting(x_TD, make_x):
            return self.shared(x_TD)

    def run_experts(self, x_ND: Tensor, weights_NK: Tensor, route: Route) -> Tensor:
        """Received rows [N, D] -> the weighted sum of what this rank's experts make of each, [N, D]."""
        order = route.order
        if getattr(self.experts, "takes_order", False):
            return self.same_shape(x_ND, self.experts(x_ND, order, weights_NK))
        rows_MD = permute(x_ND, order, self.kernels)
        out_MD = self.same_shape(rows_MD, self.experts(rows_MD, order.expert_offsets))
        return unpermute(out_MD, order, weights_NK, self.kernels)

    def same_shape(self, rows: Tensor, out: Tensor) -> Tensor:
        """`out`, if the experts made it of `rows` as they should. Raises ValueError otherwise."""
        if out.shape != rows.shape:
            raise ValueError(
                f"{type(self.experts).__name__} must map rows {[*rows.shape]} to rows of the same shape: "
                f"got {[*out.shape]}"
            )
        return out

    def take_load(self) -> Tensor:
        """Tokens per expert [E] that this rank's tokens chose since the last call."""
        return self.router.take_load()


def send(ep: ExpertParallel, route: Route, x_TD: Tensor, weights_TK: Tensor | None = None) -> Pending[Received]:
    return ep.dispatch(x_TD, route, weights_TK)


def bring(ep: ExpertParallel, route: Route, y_ND: Tensor, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
    return ep.combine(y_ND, route, weight_grads_NK)


def expert_loads(module: nn.Module) -> Tensor | None:
    """Tokens per expert since the last call, [MoE layers, E]; None for a module without Mixture-of-Experts layers."""
    loads = [layer.take_load() for layer in module.modules() if isinstance(layer, MoE)]
    return torch.stack(loads) if loads else None
