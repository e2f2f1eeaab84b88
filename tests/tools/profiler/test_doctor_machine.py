"""The machine that makes traces with known faults: its clock, against times worked out by hand."""

import pytest

from tests.support.faults import run
from tests.support.faults.program import Await, Collective, Graph, Item, Job, Kernel, Machine, Python, Record

PLAIN = Machine(
    call_us=0, launch_us=2, latency_us=3, gap_us=0, slower_beside_transfers=0.5, slower_beside_computation=1
)  # fmt: skip
SENT = Record("go"), Collective("t", "all_reduce", "ep", (0, 1), 10, 1, "ep", "go")


@pytest.mark.parametrize(("programs", "queues", "expected"), [
    # two streams share the device, a stream runs in order, and a host ahead costs nothing
    ([(Kernel("a", 10), Kernel("b", 20), Kernel("c", 5, "other"))], 9, {"0a": (5, 20), "0b": (20, 40), "0c": (9, 19)}),
    # a slow host delays each kernel
    ([(Kernel("a", 1), Python(30), Kernel("b", 1))], 9, {"0a": (5, 6), "0b": (2 + 30 + 2 + 3, 38)}),
    # a number holds the host until its stream is done
    ([(Kernel("a", 100), Item(), Kernel("b", 1))], 9, {"0a": (5, 105), "0Memcpy": (105, 107), "0b": (114, 115)}),
    # an event orders two streams
    ([(Kernel("a", 50), Record("a"), Await("a", "x"), Kernel("b", 1, "x"))], 9, {"0a": (5, 55), "0b": (55, 56)}),
    # a transfer moves data when all have joined, at 105; until then, the kernel beside it takes 1.5 times as long
    ([(*SENT, Kernel("a", 60)), (Kernel("slow", 100), *SENT)], 9,
     {"0t": (7, 115), "1t": (105, 115), "0a": (10, 100), "1slow": (5, 105)}),
    # c waits in the queue for b, and may start when b has started
    ([(Kernel("a", 50), Kernel("b", 50), Kernel("c", 1, "x"))], 1, {"0a": (5, 55), "0b": (55, 106), "0c": (55, 57)}),
    ([(Graph((Kernel("a", 5), Kernel("b", 5))),)], 9, {"0a": (7, 12), "0b": (12, 17)}),  # a graph is one launch
])  # fmt: skip
def test_times(programs, queues, expected):
    job = Job(dict(enumerate(programs)), PLAIN, {"ep": (tuple(range(len(programs))),)}).on(queues=queues)
    found = {
        f"{rank}{(span.op.name if isinstance(span.op, Kernel) else span.op.key).split()[0]}": (span.start, span.end)
        for rank, recorded in run(job).ranks.items() for span in recorded.device
    }  # fmt: skip
    assert found == expected
