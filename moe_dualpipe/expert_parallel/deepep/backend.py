"""The backend on DeepEP's kernels, for GPUs with NVLink and RDMA: `deep_ep.ElasticBuffer`, over NCCL.

    dispatch  sends rows and weights. The first also sends expert ids, and the host waits for the number of rows
    combine   sends rows and gradients of weights back, by the handle of the first dispatch

Rows are bfloat16. All calls are asynchronous: they run on DeepEP's own stream after the work that is queued on the
current stream, and return an event. Waiting for it is a stream wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.backend import Kernels
from ...overlap.annotation import annotation
from ...overlap.labels import SIZES_WAIT
from ..divided import DividedExperts
from ..exchange import AsyncResult
from ..protocol import Combined, Pending, Received, Route
from ..rank_facts import RankFacts, all_on
from .library import OTHERWISE, check_determinism, check_interface, inspect_machine, load_library

V = TypeVar("V")

MAX_TOP_K = 32  # DeepEP gives each choice of a token one thread of a warp
MULTIPLE = 256  # of the hidden size: a warp sums 16 bytes per thread


@dataclass(slots=True, eq=False)
class DeepEpPlan:
    """State of a route. ids_TK: the expert ids that DeepEP gets.

    handle: DeepEP's handle; None before the first dispatch. arriving: the event of the first dispatch until the route's
    user has waited for it.
    """

    ids_TK: Tensor
    handle: Any = None
    arriving: Any = None


class DeepEP(DividedExperts):
    """Experts are divided evenly over the ranks of `group`, in order. The experts of a token must be distinct.

    max_tokens: largest number of tokens of a rank, the same on all ranks. hidden_size: width of a token.
    num_sms: multiprocessors for transfers, even; None: DeepEP's choice. top_k: choices per token, to which DeepEP
    fits its memory; 0: any number up to 32. deterministic: sort received rows as AllToAll does, by source rank and
    token, at the price of a copy; otherwise the order differs from run to run.
    Raises ValueError if DeepEP is not installed, or does not support the machine or the sizes.
    """

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, kernels: Kernels = "auto", *, max_tokens: int,
        hidden_size: int, num_sms: int | None = None, top_k: int = 0, deterministic: bool = True,
    ):  # fmt: skip
        super().__init__(num_experts, group.size(), group.rank(), kernels)
        if num_sms is not None and (num_sms < 2 or num_sms % 2):
            raise ValueError(f"num_sms must be even and at least 2, or None: got {num_sms}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1: got {max_tokens}")
        machine = inspect_machine(group)
        check_determinism()
        library = load_library()
        check_interface(library, machine)
        if hidden_size % MULTIPLE:
            raise ValueError(f"DeepEP needs a hidden size divisible by {MULTIPLE}: got {hidden_size}; {OTHERWISE}")
        self.hidden_size, self.device_type = hidden_size, machine.device_type
        self.max_tokens, self.num_sms = max_tokens, num_sms or 0
        self.ids_dtype: torch.dtype = getattr(library, "topk_idx_t", torch.int64)  # early versions have no name for it
        self.buffer = library.ElasticBuffer(
            group, num_max_tokens_per_rank=max_tokens, hidden=hidden_size, num_topk=top_k, deterministic=deterministic
        )

    @classmethod
    def fault(cls, facts: Sequence[RankFacts]) -> str:
        return next((one.missing for one in facts if one.missing), "") if all_on("cuda", facts) else "it needs GPUs"

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        if expert_ids_TK.device.type != self.device_type:
            raise ValueError(f"DeepEP sends tensors on {self.device_type}: got {expert_ids_TK.device}; {OTHERWISE}")
        tokens, top_k = expert_ids_TK.shape
        if tokens > self.max_tokens:
            raise ValueError(
                f"DeepEP's memory is for {self.max_tokens} tokens of a rank: got {tokens}; increase max_tokens"
            )
        if top_k > MAX_TOP_K:
            raise ValueError(f"DeepEP sends at most {MAX_TOP_K} choices per token: got {top_k}; {OTHERWISE}")
        # A copy, because DeepEP's handle refers to it.
        ids_TK = expert_ids_TK.to(self.ids_dtype, copy=True, memory_format=torch.contiguous_format)
        return Route(self.experts_per_rank, self.kernels, backend_state=DeepEpPlan(ids_TK))

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        plan: DeepEpPlan = route.backend_state
        x, weights = self._rows(x_TD), _float(weights_TK)
        if plan.handle is None:
            return self._first_dispatch(x, route, weights, weights_TK)
        _wait_for_handle(plan)
        # The handle's number of multiprocessors: DeepEP does not infer it from a handle.
        x_ND, _, weights_NK, _, event = self.buffer.dispatch(
            x, topk_weights=weights, num_sms=plan.handle.num_sms, handle=plan.handle, **self._asynchronous()
        )

        return _after(event, (x, weights), lambda: Received(x_ND, _like(weights_NK, weights_TK)))

    def _first_dispatch(
        self, x: Tensor, route: Route, weights: Tensor | None, weights_TK: Tensor | None
    ) -> Pending[Received]:
        plan: DeepEpPlan = route.backend_state
        with annotation(SIZES_WAIT):  # DeepEP polls the number of rows that arrive
            x_ND, ids_NK, weights_NK, handle, event = self.buffer.dispatch(
                x, topk_idx=plan.ids_TK, topk_weights=weights, num_experts=self.num_experts, num_sms=self.num_sms,
                do_handle_copy=False, do_cpu_sync=True, **self._asynchronous(),
            )  # fmt: skip
        plan.handle, plan.arriving = handle, event
        route.num_rows, route.num_choices = len(x_ND), sum(handle.num_recv_tokens_per_expert_list)

        def finish() -> Received:
            plan.arriving = None
            route.local_ids_NK = ids_NK
            return Received(x_ND, _like(weights_NK, weights_TK))

        return _after(event, (x, weights), finish)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        plan: DeepEpPlan = route.backend_state
        if plan.handle is None:
            raise RuntimeError("the first transfer of a route must be a dispatch: got combine")
        y, grads = self._rows(y_ND), _float(weight_grads_NK)
        _wait_for_handle(plan)
        y_TD, grads_TK, event = self.buffer.combine(y, plan.handle, topk_weights=grads, **self._asynchronous())

        return _after(event, (y, grads), lambda: Combined(y_TD, _like(grads_TK, weight_grads_NK)))

    def _rows(self, rows: Tensor) -> Tensor:
        if rows.dtype != torch.bfloat16:
            raise ValueError(f"DeepEP sends rows in bfloat16: got {rows.dtype}; use --dtype bfloat16, {OTHERWISE}")
        if rows.shape[1] != self.hidden_size:
            raise ValueError(f"DeepEP's memory is for rows of {self.hidden_size} elements: got {rows.shape[1]}")
        return rows.contiguous()

    def _asynchronous(self) -> dict[str, Any]:
        event = self.buffer.capture()
        return {"previous_event": event, "async_with_compute_stream": True, "allocate_on_comm_stream": True}


def _wait_for_handle(plan: DeepEpPlan) -> None:
    """DeepEP sorts the handle after the first dispatch has been waited for."""
    if plan.arriving is not None:
        plan.arriving.current_stream_wait()


def _after(event: Any, inputs: tuple[Tensor | None, ...], result: Callable[[], V]) -> Pending[V]:
    """`result()`, after a stream wait for `event`. Keeps the inputs alive until then."""

    def finish(_inputs: tuple[Tensor | None, ...] = inputs) -> V:
        event.current_stream_wait()
        return result()

    return AsyncResult([], finish)


def _float(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.float().contiguous()


def _like(received: Tensor | None, sent: Tensor | None) -> Tensor | None:
    return None if received is None or sent is None else received.to(sent.dtype)
