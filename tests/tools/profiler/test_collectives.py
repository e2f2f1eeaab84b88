"""Rows of collectives: kinds, bytes and bandwidths, with numbers worked out by hand."""

import pytest

from moe_dualpipe.tools.profiler.collectives import (
    Met,
    bus_factor,
    bytes_of,
    collective_rows,
    element_bytes,
    kind_of_collective,
    name_of_collective,
)  # fmt: skip
from moe_dualpipe.tools.profiler.intervals import EMPTY, as_intervals
from moe_dualpipe.tools.profiler.trace import Collective, DeviceEvent


def event(name="ncclDevKernel_SendRecv(x)", start=0.0, duration=10.0, collective=None, **more):
    return DeviceEvent(name, "kernel", start, start + duration, "0", "20", None, 1, collective=collective, **more)


def rows(*events, exposed=EMPTY, met=None):
    return collective_rows(events, exposed, met)


@pytest.mark.parametrize("name,kind", [
    ("allreduce", "all_reduce"), ("allreduce_coalesced", "all_reduce"), ("_allgather_base", "all_gather"),
    ("all_gather_into_tensor_coalesced", "all_gather"), ("_reduce_scatter_base", "reduce_scatter"),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter"), ("all_to_allv", "all_to_all"), ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"), ("_broadcast_oop", "broadcast"), ("_reduce_oop", "reduce"), ("gather", "gather"),
    ("scatter", "scatter"), ("send", "send"), ("recv", "recv"), ("barrier", ""), ("wait", ""),
])  # fmt: skip
def test_names_of_the_backend_have_kinds(name, kind):
    assert kind_of_collective(event(collective=Collective(name))) == kind


@pytest.mark.parametrize("name,kind", [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
    ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "all_gather"),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"), ("ncclDevKernel_SendRecv(x)", "send_recv"),
    ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"), ("nccl:all_reduce", "all_reduce"),
    ("gloo:all_to_all", "all_to_all"), ("gloo:send", "send"), ("gloo:recvAnySource", "recv"), ("gloo:barrier", ""),
    ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_f32_sum(ncclSymkDevWorkArgs4K)", "all_reduce"),
    ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", "all_reduce"),
    ("void vllm::cross_device_reduce_1stage<__half, 2>(vllm::RankData*)", "all_reduce"),
    ("moeAllToAllKernel", "all_to_all"), ("a2a_dispatch_send_kernel", ""), ("mscclKernel_Sum_half_Simple", ""),
    ("link:carry", ""), ("shared:send", ""), ("gemm_reduce_kernel", ""), ("void deep_ep::internode::combine<1>", ""),
])  # fmt: skip
def test_names_of_kernels_have_kinds(name, kind):
    assert kind_of_collective(event(name)) == kind


def test_rows_are_named_after_the_kind_or_the_function():
    barrier = event("ncclDevKernel_AllReduce", collective=Collective("barrier"))
    found = [
        name_of_collective(one) for one in (event(), barrier, event("void (anonymous namespace)::dispatchKernel<1>()"))
    ]
    assert found == ["send_recv", "barrier", "dispatchKernel"]


@pytest.mark.parametrize("dtype,size", [
    ("BFloat16", 2), ("Float", 4), ("torch.float8_e4m3fn", 1), ("Float8_e5m2", 1), ("Long", 8), ("ComplexDouble", 16),
    ("Byte", 1), ("Bool", 1), ("", None), ("QInt8", None), ("Undefined", None),
])  # fmt: skip
def test_bytes_of_types(dtype, size):
    assert element_bytes(dtype) == size


def test_bytes_of_types_are_those_of_torch():
    torch = pytest.importorskip("torch")
    types = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    known = {name: dtype for name, dtype in types.items() if element_bytes(name) is not None}
    assert len(known) > 15
    assert {name: element_bytes(name) for name in known} == {name: dtype.itemsize for name, dtype in known.items()}


@pytest.mark.parametrize("name,elements", [
    ("allreduce", 100), ("_reduce_scatter_base", 100), ("_allgather_base", 700), ("all_to_allv", 100), ("gather", 700),
    ("scatter", 100), ("broadcast", 100), ("send", 100), ("recv", 100),
])  # fmt: skip
def test_the_side_whose_bytes_count(name, elements):
    assert bytes_of(event(collective=Collective(name, in_elems=100, out_elems=700, dtype="Half"))) == 2 * elements


def test_unknown_bytes():
    for collective in (
        Collective("allreduce", in_elems=7, dtype="QInt8"), Collective("allreduce", out_elems=7, dtype="Float"),
        Collective("all_gather", in_elems=7, dtype="Float"), Collective("barrier", in_elems=7, dtype="Float"),
    ):  # fmt: skip
        assert bytes_of(event(collective=collective)) is None
    assert bytes_of(event("link:carry")) is None
    assert bytes_of(event("Memcpy PtoP", bytes=512)) == 512
    assert bytes_of(event(collective=Collective("recv", in_elems=0, out_elems=5, dtype="Float"))) == 20


@pytest.mark.parametrize("kind,size,factor", [
    ("all_reduce", 4, 1.5), ("all_reduce", 2, 1.0), ("all_gather", 8, 0.875), ("reduce_scatter", 8, 0.875),
    ("all_to_all", 64, 63 / 64), ("gather", 4, 0.75), ("scatter", 4, 0.75), ("broadcast", 8, 1.0), ("reduce", 8, 1.0),
    ("send", 2, 1.0), ("recv", None, 1.0), ("broadcast", None, 1.0),
    ("all_reduce", None, None), ("all_reduce", 1, None), ("broadcast", 1, None), ("send_recv", 8, None), ("", 8, None),
])  # fmt: skip
def test_bus_factors(kind, size, factor):
    assert bus_factor(kind, size) == factor


def test_bandwidths_are_bytes_over_time():
    """Two reductions of 1e6 and 3e6 floats over 4 ranks in 200 and 600 us: 16e6 bytes in 800 us."""
    same = {"group": "dp", "ranks": (0, 1, 2, 3), "size": 4, "dtype": "Float"}
    first = event(start=0, duration=200, collective=Collective("allreduce", in_elems=1_000_000, **same))
    second = event(start=500, duration=600, collective=Collective("allreduce", in_elems=3_000_000, **same))
    (row,) = rows(first, second)
    assert (row.kind, row.group, row.ranks, row.size, row.dtype) == ("all_reduce", "dp", (0, 1, 2, 3), 4, "Float")
    assert (row.count, row.bytes, row.total_us, row.transfer_us) == (2, 16_000_000, 800, None)
    assert (row.algorithm_gb_s, row.bus_gb_s) == (20.0, 30.0)
    assert (row.compared, row.is_lower_limit) == (0, True)
    (row,) = rows(first, second, met={0: Met(200, True), 1: Met(200, True)})  # it waited 400 us for another rank
    assert (row.total_us, row.transfer_us, row.algorithm_gb_s, row.bus_gb_s) == (800, 400, 40.0, 60.0)
    assert (row.compared, row.is_lower_limit) == (2, False)


def test_only_compared_collectives_count_in_the_bandwidth():
    """Of two reductions, other ranks recorded the second one only: 12e6 bytes in 200 us. The first took 1 s."""
    same = {"group": "dp", "ranks": (0, 1, 2, 3), "size": 4, "dtype": "Float"}
    first = event(start=0, duration=1e6, collective=Collective("allreduce", in_elems=1_000_000, **same))
    second = event(start=2e6, duration=600, collective=Collective("allreduce", in_elems=3_000_000, **same))
    for complete in (True, False):
        (row,) = rows(first, second, met={1: Met(200, complete)})
        assert (row.count, row.bytes, row.total_us) == (2, 16_000_000, 1e6 + 600)
        assert (row.compared, row.transfer_us, row.algorithm_gb_s, row.bus_gb_s) == (1, 200, 60.0, 90.0)
        assert row.is_lower_limit is not complete
    lacking = first._replace(collective=first.collective._replace(in_elems=None))
    (row,) = rows(lacking, second, met={1: Met(200, True)})
    assert (row.bytes, row.algorithm_gb_s) == (None, 60.0)
    (row,) = rows(lacking, second, met={0: Met(200, True)})
    assert (row.bytes, row.algorithm_gb_s) == (None, None)


def test_equal_events_are_compared_one_by_one():
    """A coarse clock gives two reductions the same times. On the last rank to join they took 200 and 300 us."""
    same = event(duration=400, collective=Collective("allreduce", size=2, in_elems=1_000_000, dtype="Float"))
    (row,) = rows(same, same, met={0: Met(200, True), 1: Met(300, True)})
    assert (row.transfer_us, row.algorithm_gb_s) == (500, 16.0)


def test_one_unknown_size_makes_the_bytes_of_a_row_unknown():
    known = event(collective=Collective("allreduce", size=2, in_elems=10, dtype="Float"))
    unknown = event(start=20, collective=Collective("allreduce", size=2, dtype="Float"))
    (row,) = rows(known, unknown)
    assert (row.count, row.bytes, row.algorithm_gb_s, row.bus_gb_s) == (2, None, None, None)
    (row,) = rows(event(duration=0, collective=known.collective))
    assert (row.bytes, row.algorithm_gb_s, row.bus_gb_s) == (40, None, None)


def test_rows_differ_in_kind_group_ranks_and_dtype():
    base = Collective("allreduce", "3", "tp", (0, 1), 2, 10, 10, "Float", 1)
    changes = [{}, {"sequence": 2}, {"name": "all_reduce"}, {"in_elems": 5}]  # one row
    other = [{"name": "broadcast"}, {"description": "dp"}, {"ranks": (0, 2)}, {"dtype": "Half"}]
    events = [
        event(start=100 * i, duration=10 + i, collective=base._replace(**c)) for i, c in enumerate(changes + other)
    ]
    found = rows(*events)
    assert [row.count for row in found] == [4, 1, 1, 1, 1]
    assert [row.total_us for row in found] == [46, 17, 16, 15, 14]


def test_groups_are_called_by_their_description():
    for group, description, name in (("3", "tp", "tp"), ("3", "undefined", "3"), ("3", "", "3"), ("", "", "")):
        (row,) = rows(event(collective=Collective("allreduce", group, description)))
        assert row.group == name


def test_names_stand_for_unknown_kinds():
    found = rows(event("link:carry", duration=3), event("link:carry", start=9, duration=4), event("gloo:send", 20, 1))
    assert [(row.kind, row.count, row.total_us, row.size) for row in found] == [
        ("link:carry", 2, 7, None), ("send", 1, 1, None),
    ]  # fmt: skip
    (row,) = rows(event(collective=Collective("barrier", size=2)))
    assert row.kind == "barrier"
    (row,) = rows(event("void deep_ep::combine<false>(int*)"), event("void deep_ep::combine<true>(int*)", start=20))
    assert (row.kind, row.count) == ("deep_ep::combine", 2)


def test_exposed_time():
    """Exposed: 5-12 and 30-31. Two transfers overlap in 8-10, which counts once."""
    one = Collective("allreduce", "1", "dp", (), 2, 1, 1, "Float")
    events = [event(start=0, duration=10, collective=one), event(start=8, duration=6, collective=one),
              event(start=30, duration=4, collective=one)]  # fmt: skip
    (row,) = rows(*events, exposed=as_intervals([(5, 12), (30, 31)]))
    assert row.exposed_us == 8
