"""Transfers in memory that all ranks map: a sender writes rows directly into the receiver's memory.

    prepare   computes which rows go where; nothing is sent
    dispatch  writes the rows into the windows of their ranks, then waits for those of all ranks and copies them
    combine   writes the results back, then waits for those of all ranks and sums them

Counts travel with the rows, and the host knows none of them. So received rows are in memory for `capacity` rows, and
num_rows is the capacity. The rows past the true number have no experts, and are neither written nor read.

Each transfer uses the next slot of the windows: a sender waits until the receivers have read what it wrote there
before. Kernels wait for a limited time. The first failure is recorded on the device, and stops all later kernels. Each
transfer copies the record to the host, without waiting for the copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.backend import Kernels, aligned
from ...kernels.options import has_triton
from ...overlap import streams
from ..divided import DividedExperts
from ..exchange import AsyncResult, round_up
from ..protocol import Combined, Pending, Received, Route
from ..sends import count_sends
from .failures import COMBINE, DISPATCH, describe_failure, encode_layout

if TYPE_CHECKING:
    from ...kernels.gpu.push import Pace
    from ...kernels.gpu.signals import Operation, Windows

    Push = Callable[[Windows, Pace | None], None]
    """Writes a message to the memory to which the windows lead, at a pace; None: as fast as possible."""

V = TypeVar("V")
ALIGNMENT = 16  # bytes
"""Of each field of a row: a thread writes 16 bytes at a time."""
_DTYPES = torch.bfloat16, torch.float16, torch.float32


@dataclass(slots=True)
class OneSidedPlan:
    """State of a route. top_k: choices per token. tokens_M, slots_TC, ids_MK: as in sends.py.

    ids_MK is None once the first dispatch has started. offsets_out, offsets_in: where the sent and the received rows of
    each rank start, [R + 1] in int32. The latter are known when the first dispatch has been waited for.
    """

    top_k: int
    tokens_M: Tensor
    slots_TC: Tensor
    ids_MK: Tensor | None
    offsets_out: Tensor
    offsets_in: Tensor | None = None


def plan_route(expert_ids_TK: Tensor, num_experts: int, num_ranks: int, kernels: Kernels) -> Route:
    """A route whose state is a OneSidedPlan. Raises ValueError for expert ids out of range, except on a GPU."""
    counts_R2, finder = count_sends(expert_ids_TK, num_experts, num_ranks, kernels)
    tokens_M, ids_MK, slots_TC = finder.find()
    offsets_out = functional.pad(counts_R2[:, 0].cumsum(0), (1, 0)).int()
    plan = OneSidedPlan(expert_ids_TK.shape[1], tokens_M, slots_TC.contiguous(), ids_MK, offsets_out)
    return Route(num_experts // num_ranks, kernels, padded=True, backend_state=plan)


class DirectWrites:
    """How messages travel: kernels write them into the memory of all ranks."""

    def connect(self, windows: "Windows", memories: Sequence[Tensor]) -> None:
        """memories: the memory of each rank, to which the windows lead."""

    def send(self, windows: "Windows", operation: "Operation", fields: Sequence[Tensor], push: "Push") -> None:
        """Send a message: `push` writes it. fields: rows, weights and ids, without those that are not sent."""
        push(windows, None)

    def receive(self, windows: "Windows", operation: "Operation") -> None:
        """Called before kernels wait for the messages of all ranks."""


class OneSided(DividedExperts):
    """Rank `rank` of `num_ranks` whose memory is mapped. The owner makes the memory, and gives it to `connect`.

    transport: how messages travel. The other options are those of Symmetric (backend.py).
    Raises ValueError for sizes that cannot be used.
    """

    def __init__(
        self, num_experts: int, num_ranks: int, rank: int, kernels: Kernels = "auto", *, max_tokens: int,
        row_bytes: int, top_k: int, capacity: int | None = None, num_sms: int = 20, slots: int = 2,
        timeout: float = 600.0, transport: DirectWrites | None = None,
    ):  # fmt: skip
        super().__init__(num_experts, num_ranks, rank, kernels)
        self.transport = transport or DirectWrites()
        self.capacity = num_ranks * max_tokens if capacity is None else capacity
        _check_positive(max_tokens=max_tokens, top_k=top_k, capacity=self.capacity, num_sms=num_sms, slots=slots)
        self.max_tokens, self.max_row, self.top_k = max_tokens, row_bytes, top_k
        self.num_sms, self.slots, self.timeout = num_sms, slots, timeout
        self.names: Sequence[int] = range(num_ranks)  # in errors
        self._weights_at = round_up(row_bytes, ALIGNMENT) // 4
        field = round_up(4 * top_k, ALIGNMENT) // 4  # routing weights, or expert ids
        self._ids_at, self._row_words = self._weights_at + field, self._weights_at + 2 * field
        self._number, self._in_flight = 0, [False] * slots
        self._last: Any = None
        self._error: RuntimeError | None = None

    @property
    def memory_words(self) -> int:
        """The length of the memory of a rank, in words of 32 bits."""
        from ...kernels.gpu.signals import region_words

        return self.num_ranks * region_words(self.slots, self.max_tokens, self._row_words)

    def connect(self, memories: Sequence[Tensor]) -> None:
        """memories: the memory of each rank, zeros in int32."""
        from ...kernels.gpu.signals import Windows, new_state

        self.memories, self.own = memories, (own := memories[self.rank])
        self.windows = Windows(
            addresses_of(memories), new_state(self.slots, own.device), self.rank, self.slots, self.max_tokens,
            self._row_words, self._weights_at, self._ids_at, self.num_sms, self.timeout,
        )  # fmt: skip
        self.transport.connect(self.windows, memories)
        self._record = torch.zeros(5, dtype=torch.int32, pin_memory=own.is_cuda)
        self._seen = self._record.numpy()  # read without waiting for the copies
        if (device_streams := streams.streams_of(own.device)) is not None:
            current = device_streams.current_stream(own.device)
            self._last = current.record_event(), device_streams.is_current_stream_capturing()

    def _received_sizes(self, plan: OneSidedPlan) -> tuple[int, int]:
        """Upper bounds of the number of received rows, and of their choices of local experts."""
        return self.capacity, self.capacity * min(plan.top_k, self.experts_per_rank)

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        tokens, top_k = expert_ids_TK.shape
        if tokens > self.max_tokens:
            raise ValueError(f"max_tokens is {self.max_tokens}, but this rank has {tokens} tokens")
        if top_k > self.top_k:
            raise ValueError(f"top_k is {self.top_k}, but a token has {top_k} choices")
        self._raise_error()
        return plan_route(expert_ids_TK, self.num_experts, self.num_ranks, self.kernels)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        from ...kernels.gpu.receive import receive_rows

        plan: OneSidedPlan = route.backend_state
        x, weights = self._rows(x_TD, len(plan.slots_TC)), _weights(weights_TK)
        ids, top_k = plan.ids_MK, plan.top_k
        operation = self._push(DISPATCH, x, plan.tokens_M, plan.offsets_out, weights, ids)
        plan.ids_MK = None

        def receive() -> Received:
            (rows, most_choices), device = self._received_sizes(plan), x.device
            x_ND = x.new_empty(rows, x.shape[1])
            weights_NK = None if weights is None else weights.new_empty(rows, top_k)
            ids_NK = None if ids is None else ids.new_empty(rows, top_k)
            offsets = torch.empty(self.num_ranks + 1, dtype=torch.int32, device=device)
            receive_rows(self.windows, operation, x_ND, offsets, weights_NK, ids_NK)
            if ids_NK is not None:
                route.local_ids_NK, plan.offsets_in = ids_NK, offsets
                route.exact = streams.streams_of(device) is None  # otherwise, counting would be a host sync
                route.num_rows, route.num_choices = rows, int((ids_NK >= 0).sum()) if route.exact else most_choices
            return Received(x_ND, weights_NK)

        return self._finish(operation, receive)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        from ...kernels.gpu.receive import receive_sums

        plan: OneSidedPlan = route.backend_state
        if plan.offsets_in is None:
            raise RuntimeError("the rows of a route are not known yet: wait for its first dispatch")
        y, grads = self._rows(y_ND, self._received_sizes(plan)[0]), _weights(weight_grads_NK)
        operation = self._push(COMBINE, y, None, plan.offsets_in, grads, None)

        def receive() -> Combined:
            # The expert of a choice is on one rank. The other ranks return a zero gradient for its routing weight.
            tokens = len(plan.slots_TC)
            y_TD = y.new_empty(tokens, y.shape[1])
            grads_TK = None if grads is None else grads.new_empty(tokens, grads.shape[1])
            receive_sums(self.windows, operation, y_TD, plan.slots_TC, plan.offsets_out, grads_TK)
            return Combined(y_TD, grads_TK)

        return self._finish(operation, receive)

    # ---- Transfers ----

    def _push(
        self, kind: int, rows: Tensor, index: Tensor | None, offsets: Tensor, weights: Tensor | None, ids: Tensor | None
    ) -> "Operation":
        from ...kernels.gpu.push import push
        from ...kernels.gpu.signals import Operation

        self._raise_error()
        slot = self._number % self.slots
        if self._in_flight[slot]:
            raise RuntimeError(
                f"{self.slots} transfers are in flight: wait for the first of them before you start another"
            )
        operation = Operation(slot, self._number, encode_layout(kind, rows, weights, ids))
        self._number, self._in_flight[slot] = self._number + 1, True
        fields = [field for field in (rows, weights, ids) if field is not None]

        def write(to: "Windows", pace: "Pace | None") -> None:
            push(to, operation, rows, index, offsets, weights, ids, pace)

        self._launch(lambda: self.transport.send(self.windows, operation, fields, write))
        return operation

    def _finish(self, operation: "Operation", receive: Callable[[], V]) -> Pending[V]:
        def finish() -> V:
            self._raise_error()
            self._in_flight[operation.slot] = False
            return self._launch(receive_message)

        def receive_message() -> V:
            self.transport.receive(self.windows, operation)
            return receive()

        return AsyncResult([], finish)

    def _launch(self, kernels: Callable[[], V]) -> V:
        """Launch kernels, after those that were launched before on another stream."""
        device_streams = streams.streams_of(self.own.device)
        if device_streams is None:
            result = kernels()
            self._record.copy_(self.windows.state[:5])
            self._raise_error()
            return result
        current, captured = device_streams.current_stream(self.own.device), device_streams.is_current_stream_capturing()
        self._wait_for_last(current, captured)
        result = kernels()
        self._record.copy_(self.windows.state[:5], non_blocking=True)
        self._last = current.record_event(), captured
        return result

    def _wait_for_last(self, current: Any, captured: bool) -> None:
        """Let the stream `current` wait for the last transfer, unless one is in a CUDA graph and the other is not."""
        if self._last is not None and self._last[1] == captured:
            current.wait_event(self._last[0])

    def check(self) -> None:
        """Raise the first failure, if there was one. On a GPU, this waits for the transfers."""
        if (device_streams := streams.streams_of(self.own.device)) is not None:
            self._wait_for_last(device_streams.current_stream(self.own.device), captured=False)
            self._last = None
        state = self.windows.state[:5].tolist()
        if self._error is None and state[0]:
            known = self.windows, self.own, self.names, self.capacity, self.local_experts
            self._error = describe_failure(state, *known)
        if self._error is not None:
            raise self._error

    def _raise_error(self) -> None:
        """Raise the first failure, if it is known on the host."""
        if self._seen[0]:
            self.check()

    def _rows(self, rows: Tensor, expected: int) -> Tensor:
        """The rows as the kernels need them. Raises ValueError for those that the windows are not made for."""
        num_bytes = rows.shape[1] * rows.element_size()
        if rows.dtype not in _DTYPES:
            raise ValueError(f"rows must be in bfloat16, float16 or float32: got {rows.dtype}")
        if len(rows) != expected:
            raise ValueError(f"this route has {expected} rows: got {len(rows)}")
        if num_bytes > self.max_row or num_bytes % ALIGNMENT:
            raise ValueError(
                f"rows must be multiples of {ALIGNMENT} bytes, at most {self.max_row}: got {rows.shape[1]} elements in "
                f"{rows.dtype}, {num_bytes} bytes"
            )
        rows = rows.detach()
        starts = rows.data_ptr() | (int(rows.storage_offset()) | rows.stride(0)) * rows.element_size()
        fits = rows.stride(1) == 1 and starts % ALIGNMENT == 0
        return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def addresses_of(memories: Sequence[Tensor]) -> Tensor:
    """The address of each memory, in int64, on its device."""
    return torch.tensor([memory.data_ptr() for memory in memories], device=memories[0].device)


def _weights(weights: Tensor | None) -> Tensor | None:
    if weights is not None and weights.dtype != torch.float32:
        raise ValueError(f"routing weights must be in float32: got {weights.dtype}")
    return None if weights is None else aligned("weights", weights.detach().contiguous())


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1: got {size}")


def check_triton(device: torch.device) -> None:
    if not has_triton():
        raise ValueError("Symmetric needs the triton package, which is not installed")
    from ...kernels.gpu.launch_args import interpreter_enabled

    if device.type == "cpu" and not interpreter_enabled():
        raise ValueError("Symmetric needs a GPU, or TRITON_INTERPRET=1 set before triton is imported")
