"""AllToAll counts its bytes, and its transfers are asynchronous; how rows are packed into messages.

That its results are sums over the choices of a token is in `check_round` (tests/support/exchanges.py), in which it is
the reference of all other backends.
"""

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, Local
from moe_dualpipe.expert_parallel.exchange import ALIGNMENT, ROW_ALIGNMENT, buffer_rows, pack, receive_buffer, unpack
from tests.support.properties import given, settings, st
from tests.support.ranks import run_ranks


def remote_bytes(rank):
    """To the other machine, rank 0 sends two of its tokens and rank 1 one, in rows of 128 bytes with their ids."""
    other, sent, sent_back = 1 - rank, 2 - rank, 1 + rank
    far, near = AllToAll(4, group.WORLD, remote=[other]), AllToAll(4, group.WORLD)
    for ep in (far, near):
        route = ep.prepare(torch.tensor([[2 * rank], [2 * other], [3]]))
        rows = ep.dispatch(torch.ones(3, 8), route, torch.ones(3, 1)).wait().x_ND
        assert len(rows) == 2 + 2 * rank and ep.remote_bytes == (sent * ROW_ALIGNMENT if ep is far else 0)
        ep.combine(rows, route).wait()  # back, without ids: 8 numbers of 4 bytes
    assert (far.remote_bytes, near.remote_bytes) == (sent * ROW_ALIGNMENT + sent_back * 32, 0)
    assert far.take_remote_bytes() == sent * ROW_ALIGNMENT + sent_back * 32 and far.take_remote_bytes() == 0
    assert Local(4).take_remote_bytes() == 0


def transfers_in_flight(rank):
    """Rank 0 starts its transfers before rank 1 does. Only the first dispatch waits for the other rank's counts."""
    ep = AllToAll(8, group.WORLD)
    store = torch.distributed.distributed_c10d._get_default_store()
    wait, tell = (store.wait, lambda _: None) if rank else (lambda _: None, lambda names: store.set(names[0], ""))
    wait(["prepared"])
    route = ep.prepare(torch.tensor([[0, 7], [3, 4]]))
    tell(["prepared"])
    x = torch.full((2, 5), float(rank + 1))
    first = ep.dispatch(x, route, torch.ones(2, 2))
    x_ND = first.wait().x_ND
    assert first.wait().x_ND is x_ND and x_ND[:, 0].tolist() == [1, 1, 2, 2]
    # Now that sizes are known, a dispatch and a combine can be in flight together and be waited for in any order.
    wait(["sent"])
    second, back = ep.dispatch(10 * x, route), ep.combine(x_ND, route, torch.ones(4, 2))
    tell(["sent"])
    combined = back.wait()
    assert combined.y_TD[:, 0].tolist() == [2.0 * (rank + 1)] * 2 and combined.weight_grads_TK is not None
    assert second.wait().x_ND[:, 0].tolist() == [10, 10, 20, 20]


@pytest.mark.parametrize("check", [remote_bytes, transfers_in_flight])
def test_bytes_to_other_machines_are_counted_and_transfers_start_without_waiting_for_the_other_rank(check):
    run_ranks(2, check)


# ---- messages ----


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 5),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtypes=st.permutations([torch.bfloat16, torch.float32, torch.float64, torch.int32]),
)
def test_unpack_returns_the_packed_fields_which_are_aligned(rows, widths, dtypes):
    fields = [torch.randint(-99, 99, (rows, w)).to(dtype) for w, dtype in zip(widths, dtypes, strict=False)]
    message, start = pack(fields), 0
    assert len(message) == rows and message.is_contiguous()
    for ours, field in zip(unpack(message.clone(), fields), fields, strict=True):
        assert ours.dtype == field.dtype and torch.equal(ours, field)
    for ours in unpack(message, fields):
        assert rows == 0 or ours.data_ptr() == message.data_ptr() + start
        start += -(-ours.shape[1] * ours.element_size() // ALIGNMENT) * ALIGNMENT
    assert len(fields) == 1 or message.shape[1] == -(-start // ROW_ALIGNMENT) * ROW_ALIGNMENT


def test_receive_buffers_have_eight_lengths_for_each_power_of_two():
    lengths = [buffer_rows(n) for n in range(5000)]
    assert all(n <= length <= n + n // 8 for n, length in enumerate(lengths))
    for power in (16, 128, 2048):
        assert len({*lengths[power : 2 * power]} - {power}) == 8
    received = receive_buffer(torch.empty(3, 5, dtype=torch.bfloat16), 17)
    assert received.shape == (17, 5) and received.is_contiguous() and received.untyped_storage().nbytes() == 18 * 5 * 2
