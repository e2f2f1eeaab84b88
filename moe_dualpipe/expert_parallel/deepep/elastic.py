"""DeepEP 2: `deep_ep.ElasticBuffer`, over NCCL. A dispatch with a handle can send weights."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .library import OTHERWISE
from .transfers import Plan, Sent

MULTIPLE = 256  # of the hidden size: a warp sums 16 bytes per thread


class ElasticTransfers:
    """Raises ValueError if DeepEP does not support the hidden size. num_sms: None, and DeepEP chooses.

    deterministic: received rows are sorted by source rank and token. Otherwise the order differs from run to run.
    """

    def __init__(
        self, library: Any, num_experts: int, group: dist.ProcessGroup, hidden_size: int, num_sms: int | None,
        max_tokens: int, top_k: int, deterministic: bool,
    ):  # fmt: skip
        if hidden_size % MULTIPLE:
            raise ValueError(
                f"DeepEP's ElasticBuffer needs a hidden size divisible by {MULTIPLE}: got {hidden_size}; {OTHERWISE}"
            )
        self.num_experts, self.num_sms, self.max_tokens = num_experts, num_sms or 0, max_tokens
        self.buffer = library.ElasticBuffer(
            group, num_max_tokens_per_rank=max_tokens, hidden=hidden_size, num_topk=top_k, deterministic=deterministic
        )

    def prepare(self, ids_TK: Tensor) -> None:
        """Nothing: dispatch computes the layout."""

    def dispatch(self, x_TD: Tensor, plan: Plan, weights_TK: Tensor | None) -> Sent:
        x_ND, ids_NK, weights_NK, handle, event = self.buffer.dispatch(
            x_TD, topk_idx=plan.ids_TK, topk_weights=weights_TK, num_experts=self.num_experts, num_sms=self.num_sms,
            do_handle_copy=False, do_cpu_sync=True, **self._asynchronous(),
        )  # fmt: skip
        return Sent(x_ND, ids_NK, weights_NK, sum(handle.num_recv_tokens_per_expert_list), handle, event)

    def dispatch_again(self, x_TD: Tensor, plan: Plan, weights_TK: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        # The handle's number of multiprocessors: DeepEP does not infer it from a handle.
        x_ND, _, weights_NK, _, event = self.buffer.dispatch(
            x_TD, topk_weights=weights_TK, num_sms=plan.handle.num_sms, handle=plan.handle, **self._asynchronous()
        )
        return x_ND, weights_NK, event

    def combine(self, y_ND: Tensor, plan: Plan, grads_NK: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        return self.buffer.combine(y_ND, plan.handle, topk_weights=grads_NK, **self._asynchronous())

    def _asynchronous(self) -> dict[str, Any]:
        event = self.buffer.capture()
        return {"previous_event": event, "async_with_compute_stream": True, "allocate_on_comm_stream": True}
