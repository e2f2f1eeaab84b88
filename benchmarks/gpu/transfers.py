"""Section "transfers": rates of one-sided dispatch and combine against the number of multiprocessors.

One GPU plays one of R ranks that all send the same rows: it writes them into its own windows, and then copies or sums
them (expert_parallel/modeled/windows.py). No link limits the rate. The reference is a device-to-device copy of as many
rows in the same run, which uses all multiprocessors. Rates are the bytes of rows read and written, per second.

    dispatch   push: read and write S rows;  receive_rows: read and write S rows
    combine    push: read and write S rows;  receive_sums: read S rows, write T rows

T tokens, D model dim, E experts, K experts per token, R ranks, S sent rows, N rows that can be received.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe_dualpipe.expert_parallel.exchange import round_up
from moe_dualpipe.expert_parallel.modeled.windows import mirrored_memory
from moe_dualpipe.expert_parallel.symmetric.one_sided import addresses_of, plan_route
from moe_dualpipe.kernels.gpu import push, receive, signals
from moe_dualpipe.kernels.permute import gather_sum

from .context import Context, Operation
from .measure import Case, EndPhase, single_phase


class Sizes(NamedTuple):
    T: int
    D: int
    E: int
    K: int
    R: int


SIZES = Sizes(4096, 7168, 256, 8, 8)
SMOKE_SIZES = Sizes(6, 32, 8, 3, 4)
NUM_SMS = (4, 8, 12, 16, 20, 24, 32)
SMOKE_NUM_SMS = (1, 2)


def run(context: Context) -> None:
    """Add the GB/s of both operations for each number of multiprocessors, and of the copy."""
    sizes = SMOKE_SIZES if context.smoke else SIZES
    transfers = Transfers(context, sizes)
    sent, summed = transfers.num_rows * transfers.row_bytes / 1e9, sizes.T * transfers.row_bytes / 1e9
    operations = {"copy": Operation(single_phase(transfers.copy), {"": 2 * sent}, "GB/s")}
    received = {"dispatch": 2 * sent, "combine": sent + summed}
    for name, gigabytes in received.items():
        for n in SMOKE_NUM_SMS if context.smoke else NUM_SMS:
            operations[f"{name}, {n} multiprocessors"] = Operation(
                transfers.case(name, n), {"push": 2 * sent, "receive": gigabytes}, "GB/s",
                partial(transfers.fault, name, n),
            )  # fmt: skip
    listed = " ".join(f"{name}={size}" for name, size in sizes._asdict().items())
    context.compare(f"{listed}, {transfers.num_rows:,} rows", operations, reference="copy")


class Transfers:
    """The inputs and outputs of both operations, and the windows. Tokens choose K distinct experts uniformly."""

    def __init__(self, context: Context, sizes: Sizes):
        torch.manual_seed(0)
        T, D, E, K, R = sizes
        self.x_TD = torch.randn(T, D, device=context.device, dtype=context.dtype)
        ids_TK = torch.rand(T, E, device=context.device).topk(K, dim=1).indices
        self.plan = plan_route(ids_TK, E, R, "auto").backend_state
        self.num_rows, self.row_bytes = int(self.plan.offsets_out[-1]), D * self.x_TD.element_size()
        self.expected_SD = self.x_TD[self.plan.tokens_M[: self.num_rows]]
        self.x_ND = self.x_TD.new_empty(self.plan.slots_TC.numel(), D)
        self.y_TD, self.copied_SD = torch.empty_like(self.x_TD), torch.empty_like(self.expected_SD)
        self.offsets_in = torch.empty_like(self.plan.offsets_out)
        row_words = round_up(self.row_bytes, 16) // 4
        words = R * signals.region_words(1, T, row_words)
        self.memories = mirrored_memory(words, R, context.device)
        state = signals.new_state(1, context.device)
        self.windows = signals.Windows(addresses_of(self.memories), state, 0, 1, T, row_words, 0, 0, 1, 10.0)

    def copy(self) -> Tensor:
        return self.copied_SD.copy_(self.expected_SD)

    def case(self, name: str, num_sms: int) -> Case:
        """The operation in two phases: push and receive."""
        windows, plan, operation = replace(self.windows, num_sms=num_sms), self.plan, signals.Operation(0, 0, 0)

        def dispatch(end_phase: EndPhase) -> None:
            push.push(windows, operation, self.x_TD, plan.tokens_M, plan.offsets_out)
            end_phase()
            receive.receive_rows(windows, operation, self.x_ND, self.offsets_in)
            end_phase()

        def combine(end_phase: EndPhase) -> None:
            push.push(windows, operation, self.expected_SD, None, plan.offsets_out)
            end_phase()
            receive.receive_sums(windows, operation, self.y_TD, plan.slots_TC, plan.offsets_out)
            end_phase()

        return {"dispatch": dispatch, "combine": combine}[name]

    def fault(self, name: str, num_sms: int) -> str:
        """Return what is wrong with the operation; "" if the result is right, bit for bit."""
        for t in (self.x_ND, self.y_TD):
            t.fill_(torch.nan)
        self.case(name, num_sms)(lambda: None)
        if failure := int(self.windows.state[0]):
            return f"failure {failure} (kernels/gpu/signals.py)"
        if name == "dispatch":
            right = torch.equal(self.x_ND[: self.num_rows], self.expected_SD)
        else:
            right = torch.equal(self.y_TD, gather_sum(self.expected_SD, self.plan.slots_TC))
        return "" if right else "other rows than expected"
