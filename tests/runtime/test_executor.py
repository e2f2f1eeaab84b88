"""The executor with small modules: what may be sent between stages, how long it is kept, and errors."""

import contextlib
import copy
import gc
import weakref
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_dualpipe.kernels.weight_grads import WeightGrads
from moe_dualpipe.runtime import P2P, Executor, TensorSpec
from moe_dualpipe.runtime.p2p import Message
from moe_dualpipe.schedule import Forward, Placement, Recv, Schedule, build
from tests.support.ranks import run_ranks

WIDTH, COUNT = 6, 4


class Passing(nn.Module):
    """Maps (values, integer positions, values that later stages need not use) to the same kinds.

    Positions have no gradient and must arrive unchanged. The values are not contiguous.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions, ignored):
        return (self.linear(x) * positions[:, None]).T.contiguous().T, positions, ignored * 1


def criterion(y, *_):
    return y.sum()


def passing_step(rank, name, ranks):
    torch.manual_seed(1)
    schedule = build(name, ranks, 2 * ranks)
    stages = [Passing() for _ in range(schedule.num_stages)]
    own = {s: copy.deepcopy(stages[s]) for s in schedule.placement.stages[rank]}
    batch = [(torch.randn(COUNT, WIDTH), torch.arange(1, COUNT + 1), torch.ones(2)) for _ in range(2 * ranks)]
    expected = []
    for values in batch:
        for stage in stages:
            values = stage(*values)
        criterion(*values).backward()
        expected.append(values[0].detach())
    specs = [
        TensorSpec((COUNT, WIDTH), torch.float32), TensorSpec((COUNT,), torch.int64), TensorSpec((2,), torch.float32),
    ]  # fmt: skip
    p2p = P2P.connect(torch.distributed.group.WORLD if ranks > 1 else None, specs, torch.device("cpu"))
    executor = Executor(own, p2p)
    labels = dict.fromkeys(range(2 * ranks), ())
    result = executor.step(schedule, dict(enumerate(batch)), labels, criterion, return_outputs=True)
    for micro_batch, (output, *_) in result.outputs.items():
        torch.testing.assert_close(output, expected[micro_batch])
    for s, stage in own.items():
        for p, q in zip(stage.parameters(), stages[s].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    return len(result.outputs)


@pytest.mark.parametrize("name,ranks", [("1f1b", 3), ("dualpipev", 2), ("dualpipev", 1)])
def test_tensors_of_any_layout_integers_and_unused_inputs_pass_between_stages(name, ranks):
    assert sum(run_ranks(ranks, passing_step, name, ranks)) == 2 * ranks


class Counting(nn.Module):
    """Counts how many of its outputs are alive."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def forward(self, x):
        y = x * self.weight
        self.made.append(weakref.ref(y))
        self.most = max(self.most, self.alive())
        return y

    def alive(self):
        return sum(r() is not None for r in self.made)


def test_a_step_frees_outputs_once_they_are_sent_and_everything_at_its_end():
    stages = {0: Counting(), 1: Counting()}
    step(stages, 6)
    gc.collect()
    assert [stage.alive() for stage in stages.values()] == [0, 0]
    assert len(stages[0].made) == 6
    assert [stage.most for stage in stages.values()] == [1, 1]  # of three micro-batches in flight


def one_rank(modules: Any = None):
    modules = modules or {0: nn.Linear(WIDTH, WIDTH)}
    return Executor(modules, P2P.connect(None, [TensorSpec((2, WIDTH), torch.float32)], torch.device("cpu")))


def step(stages, count, executor=None):
    """A step of DualPipeV on one rank; the values of micro-batch m are m."""
    inputs = {m: (torch.full((2, WIDTH), float(m)),) for m in range(count)}
    return (executor or one_rank(stages)).step(build("dualpipev", 1, count), inputs, None, torch.sum)


X = {0: (torch.ones(2, WIDTH),)}


class Failing(nn.Linear):
    """Fails once, with a deferred weight gradient."""

    failed, weight_grads = False, cast(WeightGrads, None)

    def forward(self, x):
        if not self.failed:
            self.failed = True
            with self.weight_grads.defer_to("an earlier micro-batch"):
                self.weight_grads.defer(self.weight, self.weight.clone)
            assert len(self.weight_grads) == 1
            raise ArithmeticError("boom")
        return super().forward(x)


def step_after_a_failed_one(rank):
    torch.manual_seed(3)
    stages = {s: Failing(WIDTH, WIDTH) for s in range(2)}
    executor = one_rank(stages)
    executor.p2p = P2P.connect(torch.distributed.group.WORLD, executor.p2p.specs, torch.device("cpu"))
    batch = {m: (torch.randn(2, WIDTH),) for m in range(4)}
    arguments = build("dualpipe", 2, 4), batch, dict.fromkeys(range(4), ()), torch.sum
    with pytest.raises(ArithmeticError) as error:
        executor.step(*arguments)  # leaves receives that get no message
    assert error.value.__notes__[-1].startswith(f"while rank {rank} (pipeline rank {rank}) ran 0F")
    assert len(executor.weight_grads) == 0
    for stage in stages.values():
        stage.failed = True
    result = executor.step(*arguments)
    for micro_batch, loss in result.losses.items():
        assert torch.equal(loss, stages[1](stages[0](*batch[micro_batch])).sum())
    return len(result.losses)


def test_a_step_has_no_messages_and_no_deferred_weight_gradients_of_a_failed_step():
    assert run_ranks(2, step_after_a_failed_one, timeout=60) == [2, 2]


def test_on_a_gpu_no_step_runs_after_a_failed_one():
    p2p = P2P((), torch.device("cuda"), 0, 1, (0,), None, None)
    with pytest.raises(ArithmeticError), p2p.step():
        raise ArithmeticError
    with pytest.raises(RuntimeError, match="an earlier step failed and left transfers unfinished"), p2p.step():
        pass


class Reusing(nn.Module):
    """Writes every output into the same buffer, as a captured graph does."""

    def __init__(self):
        super().__init__()
        self.out = torch.empty(2**20)

    def forward(self, x):
        return torch.add(x, 1, out=self.out)


def reusing_step(rank):
    p2p = P2P.connect(torch.distributed.group.WORLD, [TensorSpec((2**20,), torch.float32)], torch.device("cpu"))
    executor = Executor({rank: Reusing()}, p2p)
    with torch.no_grad():
        batch = {m: (torch.full((2**20,), float(m)),) for m in range(8)}
        result = executor.step(build("1f1b", 2, 8), batch, dict.fromkeys(range(8), ()), lambda y: y.min() + y.max())
    return [loss.item() for loss in result.losses.values()]


def test_a_module_may_reuse_its_output_buffer_when_nothing_is_trained():
    assert run_ranks(2, reusing_step) == [[], [2.0 * (m + 2) for m in range(8)]]


class Recorder:
    """Replaces the links of rank 0 of 2, and records in which order the executor uses them."""

    rank, num_ranks, device, specs = 0, 2, torch.device("cpu"), (TensorSpec((2, WIDTH), torch.float32),)
    work: Any = None

    def __init__(self):
        self.log: list[str] = []

    def step(self):
        return contextlib.nullcontext()

    def send(self, tensors, to):
        self.log.append(f"send to {to}")
        assert all(t.shape == (2, WIDTH) for t in tensors)
        return Message(tensors, (self.work,))

    def recv(self, specs, source):
        self.log.append(f"post receive from {source}")
        return Message(tuple(torch.zeros(spec.shape) for spec in specs), (self.work,))

    def wait(self, transfer, step, peer):
        assert peer == 1
        self.log.append(f"wait for {'receive' if isinstance(step, Recv) else 'send'}")
        return transfer.tensors


class Logging(nn.Linear):
    def __init__(self, log):
        super().__init__(WIDTH, WIDTH)
        self.log = log

    def forward(self, x):
        self.log.append("forward")
        x.register_hook(lambda _: self.log.append("backward")) if x.requires_grad else None
        return super().forward(x)


def test_receives_are_posted_one_compute_action_before_their_data_is_used():
    links: Any = Recorder()
    executor = Executor({0: Logging(links.log)}, links)
    executor.step(build("1f1b", 2, 3), dict.fromkeys(range(3), X[0]))
    # 1F1B on rank 0 is F F B F B B; each gradient's receive is posted one compute action ahead of its use.
    assert links.log == [
        "forward", "send to 1",
        "post receive from 1", "forward", "send to 1",
        "wait for receive",
        "post receive from 1", "wait for send", "forward", "send to 1",
        "post receive from 1", "wait for send", "wait for receive",
        "wait for receive", "wait for send",
    ]  # fmt: skip


class Checkpointed(nn.Module):
    """Records by micro-batch, which is the value of its input, whether weight gradients may be deferred."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(WIDTH)), {}
        self.weight_grads: Any = None

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x):
        self.seen.setdefault(int(x[0, 0]), []).append(self.weight_grads.can_defer)
        return x * (1 + self.weight)


class Overlapping(nn.Module):
    """Has the method that DeepSeek leaves to users. Calls `on_input_grads` `calls` times."""

    calls = 1

    @classmethod
    def overlapped_forward_backward(
        cls, module0, inputs0, criterion0, labels0, _module1, loss1, outputs1, output_grads1, *, on_input_grads
    ):
        assert type(module0) is type(_module1)
        outputs0 = module0(*inputs0)
        loss1.backward() if loss1 is not None else torch.autograd.backward(outputs1, output_grads1)
        for _ in range(cls.calls):
            on_input_grads()
        return outputs0, criterion0(outputs0, *labels0) if criterion0 else None


class OverlappedCheckpointed(Overlapping, Checkpointed): ...


@pytest.mark.parametrize("kind,never", [
    (Checkpointed, [{0, 1, 2}, {0, 1, 2, 3}]),  # 0F3's backward is split
    (OverlappedCheckpointed, [set(), {0}]),  # all others are in a pair, such as (1F1;0B0), or split
])  # fmt: skip
def test_only_split_or_overlapped_backwards_may_defer_and_recomputation_is_told_the_same(kind, never):
    """1F0;1B0 is the only micro-batch of the second stage with neither in a pair."""
    stages = {0: kind(), 1: kind()}
    step(stages, 4)
    for stage, module in stages.items():
        assert module.seen == {m: [m not in never[stage]] * 2 for m in range(4)}


class OverlappedLinear(Overlapping, nn.Linear): ...


@pytest.mark.parametrize("classes", [(OverlappedLinear, nn.Linear), (nn.Linear, OverlappedLinear)])
def test_a_pair_of_different_classes_is_not_overlapped(classes):
    stages = {s: kind(WIDTH, WIDTH) for s, kind in enumerate(classes)}
    step(stages, 3)
    assert all(p.grad is not None for stage in stages.values() for p in stage.parameters())


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_on_input_grads_is_called_once(monkeypatch, calls):
    monkeypatch.setattr(Overlapping, "calls", calls)
    problem = pytest.raises(RuntimeError, match=f"must call on_input_grads once: it made {calls} calls")
    with contextlib.nullcontext() if calls == 1 else problem:
        step({s: OverlappedLinear(WIDTH, WIDTH) for s in range(2)}, 3)


# ---- Refusals ----


def run(schedule, inputs=X, labels=None, criterion=torch.sum, modules=None):
    return lambda: one_rank(modules).step(schedule, inputs, labels, criterion)


ONE, CPU, SPEC = build("1f1b", 1, 1), torch.device("cpu"), TensorSpec((2, WIDTH), torch.float32)
REFUSED = {
    "1f1b is for 2 ranks, but the pipeline has 1": run(build("1f1b", 2, 2)),
    "rank 0 must run 0F0, but it holds these stages: 3": run(ONE, modules={3: nn.Identity()}),
    "no input for micro-batch 0, which enters at rank 0": run(ONE, {}),
    "no labels for micro-batch 0, which ends on rank 0": run(ONE, labels={}),
    "rank 0 holds the last stage and needs a criterion to train": run(ONE, criterion=None),
    "mine: stage 0 runs micro-batch 0 with 0 B, 0 I and 0 W instead of one B, or one I and one W": run(
        Schedule("mine", Placement.straight(1), 1, ((Forward(0, 0),),))
    ),
    "stage 0 produced outputs [((2, 7), torch.float32)], but the pipeline carries [((2, 6), torch.float32)]": (
        lambda: Executor({0: nn.Linear(WIDTH, WIDTH + 1)}, P2P((SPEC,), CPU, 0, 2, (0, 1), None, None)).step(
            build("1f1b", 2, 2), {0: X[0], 1: X[0]}
        )
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_steps_that_cannot_run_are_refused(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert str(error.value).splitlines()[0] == message
