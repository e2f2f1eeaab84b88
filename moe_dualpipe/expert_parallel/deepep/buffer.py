"""DeepEP 1: `deep_ep.Buffer`, with NVLink inside a host and RDMA between hosts.

A dispatch with a handle sends no weights. To send weights again, the ids are sent again too, without the handle: the
host waits for the sizes once more, and the rows arrive in the same order, sorted by source rank and token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .library import OTHERWISE
from .transfers import Plan, Sent

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # those for which DeepEP has configurations
RANKS_PER_HOST = 8
BYTES = 2  # of bfloat16


class BufferTransfers:
    """Raises ValueError if DeepEP does not support the sizes. num_sms: None for DeepEP's default.

    `Buffer.num_sms` belongs to the class: the number holds for other buffers of this process that are made later.
    """

    max_tokens = None  # tokens flow through queues of fixed size

    def __init__(self, library: Any, num_experts: int, group: dist.ProcessGroup, hidden_size: int, num_sms: int | None):
        ranks = group.size()
        if ranks not in RANKS:
            raise ValueError(f"DeepEP's Buffer needs {', '.join(map(str, RANKS))} ranks: got {ranks}; {OTHERWISE}")
        multiple = 16 if ranks <= RANKS_PER_HOST else 256
        if hidden_size % multiple:
            raise ValueError(
                f"DeepEP's Buffer needs a hidden size divisible by {multiple} for {ranks} ranks: got {hidden_size}; "
                f"{OTHERWISE}"
            )
        if num_sms is not None:
            library.Buffer.set_num_sms(num_sms)
        self.num_experts = num_experts
        self.dispatch_config = library.Buffer.get_dispatch_config(ranks)
        self.combine_config = library.Buffer.get_combine_config(ranks)
        configs, width = (self.dispatch_config, self.combine_config), hidden_size * BYTES
        nvl_bytes = max(config.get_nvl_buffer_size_hint(width, ranks) for config in configs)
        rdma_bytes = max(config.get_rdma_buffer_size_hint(width, ranks) for config in configs)
        self.buffer = library.Buffer(group, nvl_bytes, rdma_bytes)

    def prepare(self, ids_TK: Tensor) -> dict[str, Tensor | None]:
        """Compute the layout: how many tokens go to each rank and expert, and which."""
        # Only DeepEP's stream reads the result, so the current stream need not wait for it.
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            ids_TK, self.num_experts, **self._asynchronous()
        )
        return {
            "num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_rdma_rank,
            "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank,
        }  # fmt: skip

    def dispatch(self, x_TD: Tensor, plan: Plan, weights_TK: Tensor | None) -> Sent:
        # Ids cannot travel without weights.
        weights = torch.zeros_like(plan.ids_TK, dtype=torch.float32) if weights_TK is None else weights_TK
        x_ND, ids_NK, weights_NK, choices, handle, event = self.buffer.dispatch(
            x_TD, topk_idx=plan.ids_TK, topk_weights=weights, config=self.dispatch_config, **plan.layout,
            **self._asynchronous(),
        )  # fmt: skip
        return Sent(x_ND, ids_NK, None if weights_TK is None else weights_NK, sum(choices), handle, event)

    def dispatch_again(self, x_TD: Tensor, plan: Plan, weights_TK: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        if weights_TK is not None:
            sent = self.dispatch(x_TD, plan, weights_TK)
            return sent.x_ND, sent.weights_NK, sent.event
        x_ND, *_, event = self.buffer.dispatch(
            x_TD, handle=plan.handle, config=self.dispatch_config, **self._asynchronous()
        )
        return x_ND, None, event

    def combine(self, y_ND: Tensor, plan: Plan, grads_NK: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        return self.buffer.combine(
            y_ND, plan.handle, topk_weights=grads_NK, config=self.combine_config, **self._asynchronous()
        )

    def _asynchronous(self) -> dict[str, Any]:
        event = self.buffer.capture()
        return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}
