"""AllToAll gives the results of a single rank with all experts, and its transfers are asynchronous."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, Local, combine, dispatch
from moe_dualpipe.expert_parallel.choose import Choice
from moe_dualpipe.expert_parallel.exchange import ALIGNMENT, ROW_ALIGNMENT, buffer_rows, pack, receive_buffer, unpack
from moe_dualpipe.kernels.permute import permute, unpermute
from tests.support.ranks import run_ranks

EXPERTS, WIDTH = 8, 5


def routing(kind, rank, ranks):
    """Expert ids [T, K] of one rank's tokens; ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(10 * rank + 1)
    tokens, k = (1, 7, 30, 0)[rank % 4] if kind != "even" else 6, 3
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(tokens)] or [torch.empty(k)])
    ids = ids[:tokens].long()
    if kind == "one expert":
        return torch.full((tokens, 1), 5)
    if kind == "same rank":  # both experts of a token are on one rank
        return ids[:, :1] // 2 * 2 + torch.tensor([[0, 1]])
    if kind == "to the last rank":
        return EXPERTS - 1 - ids % (EXPERTS // ranks)
    return ids


def through_backend(ep, ids, x, weights, scale):
    """A Mixture-of-Experts layer in which expert e multiplies by row e of `scale`. What it sends is not contiguous."""
    route = ep.prepare(ids)
    x_ND, weights_NK = dispatch(x, weights, route, ep)
    assert (route.local_ids_NK < len(ep.local_experts)).all()
    rows_per_expert = route.order.expert_offsets.diff().long()
    scale_MD = scale[ep.local_experts.start : ep.local_experts.stop].repeat_interleave(rows_per_expert, 0)
    y_ND = unpermute(permute(x_ND, route.order) * scale_MD, route.order, weights_NK)
    return combine(y_ND.T.contiguous().T, route, ep), route.num_rows


def equals_the_sum_over_choices(rank, kind, ranks):
    ids, own, common = (
        routing(kind, rank, ranks),
        torch.Generator().manual_seed(rank),
        torch.Generator().manual_seed(99),
    )
    x, direction = (torch.randn(WIDTH, len(ids), dtype=torch.float64, generator=own).T for _ in range(2))
    weights = torch.rand(ids.shape, dtype=torch.float64, generator=own)
    scale = torch.randn(EXPERTS, WIDTH, dtype=torch.float64, generator=common)
    ours, expected = ([t.clone().requires_grad_() for t in (x, weights, scale)] for _ in range(2))
    y, num_rows = through_backend(AllToAll(EXPERTS, group.WORLD), ids, *ours)
    expected_y = expected[0] * (expected[1][:, :, None] * expected[2][ids]).sum(1)
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    for output, inputs in ((y, ours), (expected_y, expected)):
        output.backward(direction)
        torch.distributed.all_reduce(inputs[2].grad)  # experts get the tokens of all ranks
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
    sent_to = [{int(i) * ranks // EXPERTS for i in line} for line in ids]
    return num_rows, [sum(r in destinations for destinations in sent_to) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["random", "even", "one expert", "same rank", "to the last rank"])
@pytest.mark.quick("random-1", "random-4", "even-2", "one expert-4", "same rank-2", "to the last rank-4")
def test_output_and_gradients_are_those_of_a_sum_over_choices(kind, ranks):
    seen = run_ranks(ranks, equals_the_sum_over_choices, kind, ranks)
    # A token is sent once to each rank that holds any of its experts, and to no other rank.
    for rank, (rows, _) in enumerate(seen):
        assert rows == sum(sends[rank] for _, sends in seen)


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
    choice = Choice(far, "all_to_all", "as requested")
    assert choice.take_remote_bytes() == sent * ROW_ALIGNMENT + sent_back * 32 and choice.take_remote_bytes() == 0
    assert Choice(Local(4), "none", "").take_remote_bytes() == 0


def test_bytes_to_other_machines_are_counted():
    run_ranks(2, remote_bytes)


# ---- asynchronous transfers ----


def transfers_in_flight(rank):
    """Rank 0 starts its transfers before rank 1 does. Only the first dispatch waits for the other rank's counts."""
    ep = AllToAll(8, group.WORLD)
    ids = torch.tensor([[0, 7], [3, 4]])
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["prepared"])
    route = ep.prepare(ids)
    if rank == 0:
        store.set("prepared", "")
    x = torch.full((2, 5), float(rank + 1))
    first = ep.dispatch(x, route, torch.ones(2, 2))
    x_ND = first.wait().x_ND
    assert first.wait().x_ND is x_ND
    assert x_ND[:, 0].tolist() == [1, 1, 2, 2]
    # Now that sizes are known, a dispatch and a combine can be in flight together and be waited for in any order.
    if rank == 1:
        store.wait(["sent"])
    second, back = ep.dispatch(10 * x, route), ep.combine(x_ND, route, torch.ones(4, 2))
    if rank == 0:
        store.set("sent", "")
    combined = back.wait()
    assert combined.y_TD[:, 0].tolist() == [2.0 * (rank + 1)] * 2
    assert combined.weight_grads_TK is not None
    assert second.wait().x_ND[:, 0].tolist() == [10, 10, 20, 20]


def test_transfers_start_without_waiting_for_the_other_rank():
    run_ranks(2, transfers_in_flight)


# ---- messages ----


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 5),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtypes=st.lists(
        st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int32]), min_size=3, max_size=3
    ),
)
def test_unpack_returns_the_packed_fields(rows, widths, dtypes):
    fields = [torch.randint(-99, 99, (rows, w)).to(dtype) for w, dtype in zip(widths, dtypes, strict=False)]
    message = pack(fields)
    assert len(message) == rows
    assert message.is_contiguous()
    for ours, field in zip(unpack(message.clone(), fields), fields, strict=True):
        assert ours.dtype == field.dtype
        assert torch.equal(ours, field)
        assert ours.data_ptr() % min(ALIGNMENT, 16) == 0 or rows == 0


def test_rows_of_messages_and_their_fields_are_aligned():
    fields = [torch.randn(3, 9), torch.randn(3, 2), torch.ones(3, 2, dtype=torch.int32)]
    assert pack(fields).shape == (3, ROW_ALIGNMENT)  # 48 + 16 + 16 bytes
    fields[0] = torch.randn(3, 25)
    message = pack(fields)
    assert message.shape == (3, 2 * ROW_ALIGNMENT)  # 112 + 16 + 16 bytes
    assert [t.data_ptr() - message.data_ptr() for t in unpack(message, fields)] == [0, 112, 128]


def test_receive_buffers_have_eight_lengths_for_each_power_of_two():
    lengths = [buffer_rows(n) for n in range(5000)]
    assert all(n <= length <= n + n // 8 for n, length in enumerate(lengths))
    for power in (16, 128, 2048):
        assert len({*lengths[power : 2 * power]} - {power}) == 8
    assert [buffer_rows(n) for n in (0, 1, 15, 17, 1024, 1025)] == [0, 1, 15, 18, 1024, 1152]
    received = receive_buffer(torch.empty(3, 5, dtype=torch.bfloat16), 17)
    assert received.shape == (17, 5) and received.is_contiguous() and received.untyped_storage().nbytes() == 18 * 5 * 2
