"""Compare three executors of the same DualPipeV schedule: ours, one that waits before computing, and PyTorch's.

    python -m benchmarks.schedulers                      about two minutes on two cores
    python -m benchmarks.schedulers --ranks 2 --delay-ms 0 5 10

All run the same actions on the same ranks, stages (a small Mixture-of-Experts, all experts local) and micro-batches.
They differ only in when the pipeline's transfers are started and waited for:

    ours       receives are posted one action ahead, sends are waited for later. With overlap, the forward and the
               backward of a pair run interleaved; without, one after the other as in the other executors.
    waiting    our code with the order of DeepSeek's DualPipeV: the transfers since the last action form one batch,
               and the next action waits for the whole batch.
    torch      ScheduleDualPipeV of torch.distributed.pipelining. Our layers defer weight gradients through its
               `dw_builder`. It runs the two parts of an overlapped pair one after the other.

The executors take turns, round by round; their losses and gradients must agree. Transfers between processes of one
machine take almost no time, so slow links are emulated too: on both sides, a transfer completes no earlier than `delay`
after it was sent. Waiting ranks sleep, so that another rank can compute if there are more ranks than cores.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from benchmarks.common import exit_on_signals, ignore_signals, quartiles, ratios, table, take_turns
from moe_dualpipe.kernels.weight_grads import accumulate
from moe_dualpipe.models import PRESETS, TransformerStage, next_token_loss, split
from moe_dualpipe.overlap import WeightGrads, bind
from moe_dualpipe.runtime import P2P, Executor, TensorSpec
from moe_dualpipe.runtime.p2p import Message
from moe_dualpipe.runtime.rank_step import RankStep
from moe_dualpipe.runtime.stage import Stage
from moe_dualpipe.schedule import Backward, Flow, Forward, Part, Recv, Schedule, Send, Step, build, members

SEQ_LEN = 256
CLOCK = TensorSpec((1,), torch.float64)
Losses = list[Tensor]  # by micro-batch; empty on ranks without the last stage


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    ranks: int = 4
    """Pipeline ranks, each with two stages of one layer."""
    micro_batches: int = 16
    """Micro-batches in a step, one sequence each; at least two per rank."""
    delay_ms: tuple[float, ...] = (0.0, 20.0)
    """Emulated transfer times between ranks, in ms. 0: no emulation."""
    rounds: int = 12
    """Rounds. In each, every executor runs one step."""
    limit_s: float = 480.0
    """Time limit in seconds."""


# ---- The waiting executor ----


def waiting_order(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The actions of `rank` under DualPipeV, with the transfers in the order of DeepSeek's DualPipeV.

    A receive is right before the action that needs it, and a send right after the action that produces it. The
    exceptions below are those of DeepSeek's code.
    """
    actions, middle, last = schedule.actions[rank], schedule.num_ranks, schedule.num_stages - 1

    def elsewhere(stage: int, micro_batch: int) -> bool:
        return 0 <= stage <= last and schedule.rank_of(stage, micro_batch) != rank

    before: list[list[Step]] = [[] for _ in actions]
    after: list[list[Step]] = [[] for _ in (*actions, None)]
    for i, action in enumerate(actions):
        for member in members(action):
            ahead = 1 if isinstance(member, Forward) else -1
            flow = Flow.ACTIVATION if isinstance(member, Forward) else Flow.GRADIENT
            if isinstance(member, Backward) and member.part is Part.WEIGHT:
                continue
            if elsewhere(member.stage - ahead, member.micro_batch):
                before[i].append(Recv(member.stage, member.micro_batch, flow))
            if elsewhere(member.stage + ahead, member.micro_batch):
                after[i].append(Send(member.stage, member.micro_batch, flow))

    warm_up = next(i for i, action in enumerate(actions) if not isinstance(action, Forward))
    if rank == schedule.num_ranks - 1:
        warm_up -= 1  # the first forward of the steady state, which is not in a pair here
    far = [i for i in range(warm_up) if any(member.stage >= middle for member in members(actions[i]))]
    near = [
        j for j, act in enumerate(actions) if any(isinstance(h, Forward) and h.stage < middle for h in members(act))
    ]
    for i in far:
        # Forwards on both stages: receive the first stage's next input, and send its output, with those of the second.
        coming = next(j for j in near if j > i)
        before[i] = before[coming][:1] + before[i]
        before[coming] = before[coming][1:]
        after[i], after[i - 1] = after[i] + after[i - 1], []
    if rank == schedule.num_ranks - 1:
        after[warm_up], after[warm_up - 1] = after[warm_up - 1] + after[warm_up], []
    for i, action in enumerate(actions[:-1]):
        # A weight gradient waits for the input of the forward that follows it.
        if isinstance(action, Backward) and action.part is Part.WEIGHT and isinstance(actions[i + 1], Forward):
            before[i], before[i + 1] = before[i + 1], []
    return tuple(step for i, action in enumerate(actions) for step in (*before[i], action, *after[i]))


class Waiting(Executor):
    """An executor that waits for all pending transfers before each action."""

    def step(self, schedule: Schedule, inputs: Any, labels: Any = None, criterion: Any = None, return_outputs=False):
        stages = {index: Stage(index, module, self.weight_grads) for index, module in self.modules.items()}
        run = _WaitingStep(schedule, self.p2p, stages, frozenset(), labels, criterion, return_outputs)
        with self.p2p.step():
            return run.run(waiting_order(schedule, self.p2p.rank), inputs)


class _WaitingStep(RankStep):
    def run(self, steps: tuple[Step, ...], inputs: Any):
        for micro_batch, tensors in inputs.items():
            self.receiving[Flow.ACTIVATION][0, micro_batch] = Message(tuple(tensors))
        batch: list[Callable[[], object]] = []
        for step in steps:
            match step:
                case Recv():
                    self.post_receive(step)
                    batch.append(partial(self._arrive, step))
                case Send():
                    batch.append(self.send(step).wait)
                case _:
                    self._complete(batch)
                    self.compute(step)
        self._complete(batch)
        return self.result

    def _complete(self, batch: list[Callable[[], object]]) -> None:
        for wait in batch:
            wait()
        batch.clear()

    def _arrive(self, step: Recv) -> None:
        receiving, key = self.receiving[step.flow], (step.stage, step.micro_batch)
        receiving[key] = Message(receiving[key].wait())  # gloo allows only one wait for each receive


# ---- An emulated slow link ----


@dataclass(frozen=True)
class Until:
    """`wait` sleeps until `delay` seconds after `sent_1`, on the clock that all processes of a machine share."""

    sent_1: Tensor
    delay: float

    def wait(self) -> None:
        if (left := self.sent_1.item() + self.delay - time.perf_counter()) > 0:
            time.sleep(left)


def _now() -> Tensor:
    return torch.tensor([time.perf_counter()], dtype=CLOCK.dtype)


@dataclass(frozen=True)
class SlowP2P(P2P):
    """Transfers take at least `delay` seconds. Each carries the time at which it was sent."""

    delay: float = 0.0

    def send(self, tensors: Sequence[Tensor], to: int) -> Message:
        sending = super().send((*tensors, _now()), to)
        late: Any = Until(sending.tensors[-1], self.delay)
        return replace(sending, works=(*sending.works, late))

    def recv(self, specs: Sequence[TensorSpec], source: int) -> Message:
        receiving = super().recv((*specs, CLOCK), source)
        *tensors, sent_1 = receiving.tensors
        late: Any = Until(sent_1, self.delay)
        return Message(tuple(tensors), (*receiving.works, late))


class SlowStage(PipelineStage):
    """The same for PyTorch's stages. They need no delay for sends, which they wait for only at the end of a step."""

    def __init__(self, *args: Any, delay: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.delay = delay
        self.late: dict[tuple[str, int], Until] = {}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_clock(super().get_fwd_send_ops(fwd_chunk_id), _now())

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_clock(super().get_bwd_send_ops(bwd_chunk_id), _now())

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._expected(super().get_fwd_recv_ops(fwd_chunk_id), ("F", fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._expected(super().get_bwd_recv_ops(bwd_chunk_id), ("B", bwd_chunk_id))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._arrive("F", fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._arrive("B", bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _expected(self, ops: list[dist.P2POp], key: tuple[str, int]) -> list[dist.P2POp]:
        sent_1 = CLOCK.empty(self.device)
        self.late[key] = Until(sent_1, self.delay)
        return self._with_clock(ops, sent_1)

    def _with_clock(self, ops: list[dist.P2POp], time_1: Tensor) -> list[dist.P2POp]:
        return [*ops, dist.P2POp(ops[0].op, time_1, ops[0].peer, ops[0].group)] if ops and self.delay else ops

    def _arrive(self, *key: Any) -> None:
        late = self.late.pop(key, None)
        if late is not None and self.delay:
            late.wait()


# ---- The executors ----


class TorchWeightGrads(WeightGrads):
    """Defers every weight gradient until PyTorch runs it. PyTorch calls `take` after each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def defers(self, parameter: Tensor) -> bool:
        return True

    def defer(self, parameter: Tensor, compute: Callable[[], Tensor], add_to: object = None) -> None:
        self.latest.append((parameter, compute))

    def take(self) -> Callable[[], None]:
        deferred, self.latest = self.latest, []
        return partial(self._run_all, deferred)

    @torch.no_grad()
    def _run_all(self, deferred: list[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        for parameter, compute in deferred:
            accumulate(parameter, compute)


def make_steps(options: Options, delay: float) -> tuple[dict[str, Callable[[], Losses]], list[TransformerStage]]:
    """Return a function for one step of each executor, by name, and the stages they share. Collective."""
    rank, ranks, count = dist.get_rank(), options.ranks, options.micro_batches
    model = replace(PRESETS["tiny"], num_layers=2 * ranks)
    schedule = build("dualpipev", ranks, count)
    specs = split(model, schedule.num_stages)
    stages = {index: TransformerStage(model, specs[index]) for index in schedule.placement.stages[rank]}
    torch.manual_seed(0)
    tokens = torch.randint(model.vocab_size, (count, SEQ_LEN + 1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    ends = rank == 0  # of the V: rank 0 holds the first and the last stage

    hidden = TensorSpec((1, SEQ_LEN, model.hidden_size), torch.float32)
    group = dist.group.WORLD
    p2p = P2P.connect(group, [hidden], torch.device("cpu"))
    if delay:
        p2p = SlowP2P(**{f.name: getattr(p2p, f.name) for f in fields(p2p)}, delay=delay)

    def our_step(executor: Executor) -> Losses:
        _bind(stages, executor.weight_grads)
        inputs = {m: (x[m : m + 1],) for m in range(count)} if ends else {}
        labels = {m: (y[m : m + 1],) for m in range(count)} if ends else {}
        losses = executor.step(schedule, inputs, labels, next_token_loss).losses
        return [losses[m] for m in sorted(losses)]

    deferred = TorchWeightGrads()

    def torch_step(runner: ScheduleDualPipeV) -> Losses:
        _bind(stages, deferred)
        losses: Losses = []
        if ends:
            runner.step(x, target=y, losses=losses, return_outputs=False)
        else:
            runner.step(return_outputs=False)
        return [loss.detach() for loss in losses]

    def torch_stage(index: int) -> SlowStage:
        first, last = x[:1], torch.empty(1, SEQ_LEN, model.vocab_size, requires_grad=True)
        between = torch.empty(hidden.shape, requires_grad=True)
        return SlowStage(
            stages[index], index, schedule.num_stages, torch.device("cpu"),
            input_args=between if index else first,
            output_args=between if index < schedule.num_stages - 1 else last,
            group=group, dw_builder=deferred.take, delay=delay,
        )  # fmt: skip

    torch_schedule = ScheduleDualPipeV([torch_stage(i) for i in stages], count, next_token_loss, scale_grads=False)
    runners = {
        "ours": partial(our_step, Executor(stages, p2p)),
        "ours, no overlap": partial(our_step, Executor(stages, p2p, overlap=False)),
        "waiting": partial(our_step, Waiting(stages, p2p)),
        "torch": partial(torch_step, torch_schedule),
    }
    return runners, list(stages.values())


def _bind(stages: dict[int, TransformerStage], weight_grads: WeightGrads) -> None:
    for stage in stages.values():
        bind(stage, weight_grads)


# ---- Measuring ----


@dataclass(frozen=True)
class Row:
    """Steps of one executor over one link. seconds: of the slowest rank, by round."""

    delay_ms: float
    name: str
    seconds: list[float]


def _measure(rank: int, options: Options, store: str, results: Any) -> None:
    signal.alarm(int(options.limit_s))  # in case the parent dies
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks, timeout=wait)
    cases: dict[tuple[float, str], Callable[[], float]] = {}
    for delay in options.delay_ms:
        runners, stages = make_steps(options, delay / 1e3)
        _check_agreement({name: _outcome(runner, stages) for name, runner in runners.items()})
        cases |= {(delay, name): partial(_timed, runner, stages) for name, runner in runners.items()}
    slowest = torch.tensor(list(take_turns(options.rounds, cases).values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        results.put([Row(*case, seconds) for case, seconds in zip(cases, slowest.tolist(), strict=True)])
    dist.destroy_process_group()


def _timed(runner: Callable[[], Losses], stages: list[TransformerStage]) -> float:
    _zero_grad(stages)
    dist.barrier()
    start = time.perf_counter()
    runner()
    return time.perf_counter() - start


def _zero_grad(stages: list[TransformerStage]) -> None:
    for stage in stages:
        stage.zero_grad()


def _outcome(runner: Callable[[], Losses], stages: list[TransformerStage]) -> tuple[Losses, list[Tensor]]:
    _zero_grad(stages)
    losses = runner()
    return losses, [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]


def _check_agreement(outcomes: dict[str, tuple[Losses, list[Tensor]]]) -> None:
    """Raise AssertionError unless all losses are equal and all gradients agree up to rounding."""
    losses, grads = outcomes["ours"]
    for name, (other_losses, other_grads) in outcomes.items():
        torch.testing.assert_close(other_losses, losses, rtol=0, atol=0, msg=lambda m, n=name: f"losses of {n}: {m}")
        torch.testing.assert_close(other_grads, grads, msg=lambda m, n=name: f"gradients of {n}: {m}")


def measure(options: Options) -> list[Row]:
    """Start the ranks and return their rows. Raises TimeoutError, or the error of a rank that fails."""
    deadline = time.monotonic() + options.limit_s
    with exit_on_signals(), tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        arguments = (options, f"{folder}/store", results)
        how: Any = {"join": False, "daemon": True, "start_method": "spawn"}
        processes: Any = mp.start_processes(_measure, arguments, nprocs=options.ranks, **how)
        try:
            while not processes.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the ranks did not finish within {options.limit_s:g} s")
            return results.get()
        finally:
            ignore_signals()
            for process in processes.processes:
                process.kill()


def format_rows(rows: list[Row]) -> str:
    """Format medians and quartiles over the rounds. Each ratio compares two steps of the same round."""
    columns = (
        "emulated transfer | executor | ms per step | quartiles | ours / this | quartiles | ours, no overlap / this "
        "| quartiles"
    )
    by_name, cells = {(row.delay_ms, row.name): row.seconds for row in rows}, []
    for row in rows:
        ours, plain = (ratios(by_name[row.delay_ms, name], row.seconds) for name in ("ours", "ours, no overlap"))
        middle = quartiles([1e3 * second for second in row.seconds], ".0f")
        delay = f"{row.delay_ms:g} ms" if row.delay_ms else "none"
        cells.append([delay, row.name, *middle, *quartiles(ours, ".2f"), *quartiles(plain, ".2f")])
    return table(columns, cells)


def report(options: Options) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = measure(options)
    print(
        f"dualpipev on {options.ranks} processes with {os.cpu_count()} cores, 1 thread each; "
        f"{options.micro_batches} micro-batches of {SEQ_LEN} tokens, {2 * options.ranks} layers, Local experts; "
        f"torch {torch.__version__}, gloo\n"
        f"{options.rounds} rounds; losses are equal, gradients agree. Emulated transfer: "
        "the minimum time from send to completion, on both sides; everything else is real."
    )
    print(format_rows(rows))


def main() -> None:
    report(tyro.cli(Options, description=__doc__))


if __name__ == "__main__":
    main()
