"""The deduction of who waits for whom, and what a rank says that it does."""

import time
from concurrent import futures
from dataclasses import replace

import pytest
import torch

from moe_dualpipe.checkpoint.save import Saver
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.expert_parallel.shared.mailbox import Mailbox
from moe_dualpipe.health.heartbeat import SAVING, CodePosition, Heartbeat, Progress, describe_waits
from moe_dualpipe.overlap import Collective, Comm, Engine
from moe_dualpipe.runtime import P2P
from moe_dualpipe.runtime.p2p import Message
from moe_dualpipe.schedule import Flow, Recv, Send, parse

BUSY = Heartbeat("step 3, 1F2 (own.py:5 in forward)", seconds=30.6, order=(9, 40))


def waiting(transfer, order, group=(), peer=None):
    return Heartbeat("step 3", True, 31.2, transfer, peer, group, order)


IN_STEP = "in step 3, 1F2 (own.py:5 in forward) for 31 s"
DISPATCH = waiting("dispatch forward of layer 12, micro-batch 4", (9, 44), group=(2, 3, 4, 5))
COMBINE = waiting("combine backward of layer 1", (9, 44), group=(0, 1))
GRADIENTS = waiting("gradients of step 3", (10, 0))
RECEIVING = waiting("activations for stage 2, micro-batch 3", (9, 7), peer=1)
SAVED = waiting("checkpoint of step 3", (10, 0))
WRITING = Heartbeat("step 3, checkpoint, step 3: writing rank-1-0.safetensors", seconds=2.0, order=(10, 0))
LEFT_OUT = "rank 0 waits in combine backward of layer 1 (for 31 s); rank 1 went on without it"


@pytest.mark.parametrize("states,lines", [
    # Segments count only between ranks of one group, and phases come before segments.
    ({2: replace(DISPATCH, seconds=12.0), 3: DISPATCH, 4: replace(BUSY, order=(8, 90)), 5: BUSY,
      6: replace(BUSY, order=(9, 1))},
     ["ranks 2, 3 wait for ranks 4, 5: dispatch forward of layer 12, micro-batch 4 (for 31 s)", f"rank 4: {IN_STEP}",
      f"rank 5: {IN_STEP}"]),
    # A phase waits for all that have not begun it: ranks of other pipelines have other numbers of segments.
    ({0: GRADIENTS, 1: replace(BUSY, order=(9, 400)), 2: RECEIVING, 3: GRADIENTS},
     ["ranks 0, 3 wait for ranks 1, 2: gradients of step 3 (for 31 s)",
      "rank 2 waits for rank 1: activations for stage 2, micro-batch 3 (for 31 s)", f"rank 1: {IN_STEP}"]),
    # A transfer that a rank has left out is told from one that it has not reached.
    ({0: COMBINE, 1: GRADIENTS}, [LEFT_OUT, "rank 1 waits for rank 0: gradients of step 3 (for 31 s)"]),
    ({0: COMBINE, 1: replace(BUSY, order=(10, 0))}, [LEFT_OUT, f"rank 1: {IN_STEP}"]),
    ({0: COMBINE, 1: COMBINE},
     ["ranks 0, 1 wait in combine backward of layer 1 (for 31 s); all its ranks have arrived"]),
    # In one phase, ranks wait for the one that does not, however many segments they ran in it.
    ({0: SAVED, 1: WRITING, 2: replace(SAVED, order=(10, 7))},
     ["ranks 0, 2 wait for rank 1: checkpoint of step 3 (for 31 s)", f"rank 1: in {WRITING.position} for 2 s"]),
    # Ranks that have ended, or do not answer, are waited for.
    ({0: GRADIENTS, 1: None, 2: replace(BUSY, ended=True)},
     ["rank 0 waits for ranks 1, 2: gradients of step 3 (for 31 s)", "rank 1: no sign of life",
      f"rank 2: has ended in {BUSY.position}"]),
    # Busy ranks do not wait.
    ({0: BUSY, 1: BUSY}, []),
    ({0: replace(BUSY, transfer="optimizer of step 3"), 1: BUSY}, []),
])  # fmt: skip
def test_who_waits_for_whom(states, lines):
    assert describe_waits(states) == lines


# ---- What a rank says ----


def running(action=None, experts=(0, 1)):
    progress, engine = Progress(), Engine(torch.device("cpu"))
    links = P2P((), torch.device("cpu"), 0, 2, (4, 6), None, None)
    progress.watch(engine, links, dict.fromkeys(("dispatch", "combine"), experts))
    progress.begin(3)
    progress.note(action and parse(action))
    return progress, engine, links


def said(progress, waits=True):
    return Heartbeat.of(progress, CodePosition("wait.py:1 in wait", waits, (0, 0)), 2.0)


@pytest.mark.parametrize(
    "action,label,text",
    [
        ("(1F3;0B6)OVERLAP_F_B", "wait for dispatch(F)", "dispatch forward of layer 12"),
        ("(1F3;0B6)OVERLAP_F_B", "combine(B)", "combine backward of layer 12"),
        ("(1F3;0B6)OVERLAP_F_B", "prepare dispatch(F)", "dispatch forward of layer 12"),
        ("2I5", "wait for dispatch(B)", "dispatch backward of layer 12"),
        (None, "dispatch(F)", "dispatch forward of layer 12"),
    ],
)
def test_a_transfer_of_experts_is_named_while_it_is_waited_for(action, label, text):
    progress, engine, _ = running(action)
    with engine.annotate("mlp(F)", 12), engine.annotate(label, 12):
        assert (said(progress).transfer, said(progress).group) == (text, (0, 1))
    assert said(progress).transfer == "a collective operation, wait.py:1 in wait"
    assert said(progress, waits=False).transfer == ""


def test_a_rank_whose_own_disk_hangs_in_a_save_does_not_wait_for_others():
    progress, *_ = running()
    with progress.during(SAVING):
        assert said(progress).waiting and said(progress).transfer == "checkpoint of step 3"
        progress.note_save("step 3: writing rank-0-0.safetensors")
        assert not said(progress).waiting and "writing rank-0-0" in said(progress).position
        progress.note_save("")
        assert said(progress).waiting


def test_segments_are_counted_from_the_begin_of_a_phase_and_the_enclosing_one_is_restored():
    progress, engine, _ = running("1F3")
    with engine.annotate("attn(F)", 0):
        pass
    before = progress.place
    with engine.annotate("mlp(F)", 1):
        with engine.annotate("wait for dispatch(F)", 1):
            assert progress.order == (1, 3)
        assert str(progress) == "step 3, 1F3, mlp forward of layer 1" and progress.place != before
        with pytest.raises(ValueError), engine.annotate("wait for combine(F)", 1):
            raise ValueError
        assert progress.segment == "mlp forward of layer 1"
    with progress.during("gradients"):
        assert progress.order == (2, 0)
    assert progress.order == (3, 0) and str(progress) == "step 3, 1F3"


@pytest.mark.parametrize(
    "step,text",
    [
        (Recv(2, 5, Flow.ACTIVATION), "activations for stage 2, micro-batch 5"),
        (Recv(2, 5, Flow.GRADIENT), "gradients for stage 2, micro-batch 5"),
        (Send(2, 5, Flow.GRADIENT), "sending gradients of stage 2, micro-batch 5"),
    ],
)
def test_a_wait_for_a_pipeline_rank_names_its_global_rank(step, text):
    progress, _, links = running("2F5")

    class Message:
        def wait(self):
            seen.append(said(progress))
            return ("data",)

    seen: list[Heartbeat] = []
    assert links.wait(Message(), step, 1) == ("data",)
    assert (seen[0].transfer, seen[0].peer) == (text, 6)
    assert said(progress).peer is None


class Look:
    """A transfer that notes whether the main thread waits, as another thread sees it during `wait`.

    It is one of a user's backend: its functions are not marked.
    """

    waits = None

    def wait(self):
        with futures.ThreadPoolExecutor(1) as other:
            self.waits = other.submit(CodePosition.of_main_thread).result().waiting
        return ()


def run_in_engine(look):
    def segments():
        (yield Comm("dispatch", Collective(lambda: look, lambda: None))).wait()

    Engine(torch.device("cpu")).run(segments(), "F")


def receive_a_notice(look):
    mailbox = Mailbox.__new__(Mailbox)
    mailbox.timeout = 9
    mailbox.wait(lambda: [*look.wait()], "it answered")


def wait_for_a_save(look):
    def save():
        return any(CodePosition.of_main_thread().waiting or time.sleep(0.01) for _ in range(1000))

    saver = Saver.__new__(Saver)
    with futures.ThreadPoolExecutor(1) as other:
        saver._pending = other.submit(save)  # pyright: ignore[reportAttributeAccessIssue]
        look.waits = saver.wait()


@pytest.mark.parametrize("call", [
    run_in_engine, receive_a_notice, wait_for_a_save, lambda look: Message((), (look,)).wait(),
    lambda look: AsyncResult([look], lambda: None).wait(),
])  # fmt: skip
def test_a_marked_wait_is_seen_whatever_it_calls(call):
    look, unmarked = Look(), Look()
    call(look)
    unmarked.wait()
    assert (look.waits, unmarked.waits) == (True, False)
