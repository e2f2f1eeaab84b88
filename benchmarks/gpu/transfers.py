"""Section "transfers": rates of one-sided dispatch and combine against the number of multiprocessors.

One GPU plays one of R ranks that all send the same rows: it writes them into its own windows, and then copies or sums
them (expert_parallel/modeled/windows.py). No link limits the rate. The reference is a device-to-device copy of as many
rows in the same run, which uses all multiprocessors. Rates are the bytes of rows read and written, per second.

    dispatch   push: read and write S rows;  receive_rows: read and write S rows
    combine    push: read and write S rows;  receive_sums: read S rows, write T rows

T tokens, D model dim, E experts, K experts per token, R ranks, S sent rows, N rows that can be received.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_dualpipe.expert_parallel.exchange import round_up
from moe_dualpipe.expert_parallel.modeled.windows import mirrored_memory
from moe_dualpipe.expert_parallel.symmetric.one_sided import addresses_of, plan_route
from moe_dualpipe.kernels.permute import gather_sum

from .context import Context
from .measure import Case, EndPhase, error_summary, rate_statistics, single_phase, time_interleaved


class Sizes(NamedTuple):
    T: int
    D: int
    E: int
    K: int
    R: int


GOAL_SIZES = Sizes(4096, 7168, 256, 8, 8)
GOAL_SMS = 24
SMOKE_SIZES = Sizes(6, 32, 8, 3, 4)
NUM_SMS = (4, 8, 12, 16, 20, 24, 32)
SMOKE_NUM_SMS = (1, 2)


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record: the sizes, "rows", the copy, and for each number of multiprocessors the rates of both operations."""
    sizes = SMOKE_SIZES if context.smoke else GOAL_SIZES
    transfers = Transfers(context, sizes)
    num_sms = SMOKE_NUM_SMS if context.smoke else NUM_SMS
    record.update(sizes=sizes._asdict(), rows=transfers.num_rows, dispatch={}, combine={})
    cases: dict[str, Case] = {"copy": single_phase(transfers.copy)}
    for name in ("dispatch", "combine"):
        for n in num_sms:
            outcome = record[name].setdefault(str(n), {})
            if fault := transfers.fault(name, n):
                outcome.update(status="wrong", reason=fault)
            else:
                cases[f"{name}/{n}"] = transfers.case(name, n)
    times = time_interleaved(context.clock, cases, *context.rounds_and_repeats)
    sent, summed = transfers.num_rows * transfers.row_bytes, sizes.T * transfers.row_bytes
    record["copy"] = rate_statistics(times.seconds["copy"][0], 2 * sent / 1e9, "GB/s")
    moved = {"dispatch": (2 * sent, 2 * sent), "combine": (2 * sent, sent + summed)}
    for case in cases.keys() - {"copy"}:
        name, n = case.split("/")
        outcome = record[name][n]
        if case in times.failures:
            outcome.update(status="failed", reason=times.failures[case])
            continue
        phases = times.seconds[case]
        for phase, seconds, num_bytes in zip(("push", "receive"), phases, moved[name], strict=True):
            outcome[phase] = rate_statistics(seconds, num_bytes / 1e9, "GB/s")
        both = [push + receive for push, receive in zip(*phases, strict=True)]
        outcome |= rate_statistics(both, sum(moved[name]) / 1e9, "GB/s")
        outcome.update(status="timed", share=outcome["median"] / record["copy"]["median"])
    for name in ("dispatch", "combine"):
        for n, outcome in record[name].items():
            context.log(f"  {name}, {n} multiprocessors: {outcome['status']} {outcome.get('reason', '')}")
    context.save()


class Transfers:
    """The inputs and outputs of both operations, and the windows. Tokens choose K distinct experts uniformly."""

    def __init__(self, context: Context, sizes: Sizes):
        from moe_dualpipe.kernels.gpu.signals import Windows, new_state, region_words

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
        words = R * region_words(1, T, row_words)
        self.memories = mirrored_memory(words, R, context.device)
        state = new_state(1, context.device)
        self.windows = Windows(addresses_of(self.memories), state, 0, 1, T, row_words, 0, 0, 1, 10.0)

    def copy(self) -> Tensor:
        return self.copied_SD.copy_(self.expected_SD)

    def case(self, name: str, num_sms: int) -> Case:
        """The operation in two phases: push and receive."""
        from moe_dualpipe.kernels.gpu.push import push
        from moe_dualpipe.kernels.gpu.receive import receive_rows, receive_sums
        from moe_dualpipe.kernels.gpu.signals import Operation

        windows, plan, operation = replace(self.windows, num_sms=num_sms), self.plan, Operation(0, 0, 0)

        def dispatch(end_phase: EndPhase) -> None:
            push(windows, operation, self.x_TD, plan.tokens_M, plan.offsets_out)
            end_phase()
            receive_rows(windows, operation, self.x_ND, self.offsets_in)
            end_phase()

        def combine(end_phase: EndPhase) -> None:
            push(windows, operation, self.expected_SD, None, plan.offsets_out)
            end_phase()
            receive_sums(windows, operation, self.y_TD, plan.slots_TC, plan.offsets_out)
            end_phase()

        return {"dispatch": dispatch, "combine": combine}[name]

    def fault(self, name: str, num_sms: int) -> str:
        """What is wrong with the operation; "" if it has the right bits."""
        for t in (self.x_ND, self.y_TD):
            t.fill_(torch.nan)
        try:
            self.case(name, num_sms)(lambda: None)
            if failure := int(self.windows.state[0]):
                return f"failure {failure} (kernels/gpu/signals.py)"
            if name == "dispatch":
                right = torch.equal(self.x_ND[: self.num_rows], self.expected_SD)
            else:
                right = torch.equal(self.y_TD, gather_sum(self.expected_SD, self.plan.slots_TC))
        except Exception as error:  # an operation that fails must not end the run
            return error_summary(error)
        return "" if right else "other rows than expected"
