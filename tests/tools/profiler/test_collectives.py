"""The kind of a collective, and its bytes on the side that nccl-tests counts."""

import pytest
import torch

from moe_dualpipe.tools.profiler.collectives import bytes_of, element_bytes, group_name, kind_of_collective
from moe_dualpipe.tools.profiler.trace import Collective, DeviceEvent


def event(name="ncclDevKernel_SendRecv(x)", collective=None, moved=0):
    return DeviceEvent(name, "kernel", 0.0, 10.0, "0", "20", None, 1, moved, collective)


@pytest.mark.parametrize("kind,names", [
    ("all_reduce", "allreduce allreduce_coalesced"), ("all_gather", "_allgather_base all_gather_into_tensor"),
    ("reduce_scatter", "_reduce_scatter_base reduce_scatter_tensor_coalesced"), ("all_to_all", "all_to_allv"),
    ("broadcast", "broadcast _broadcast_oop"), ("reduce", "_reduce_oop"), ("gather", "gather"), ("scatter", "scatter"),
    ("send", "send"), ("recv", "recv"), ("", "barrier wait"),
])  # fmt: skip
def test_names_of_the_backend_have_kinds(kind, names):
    found = {name: kind_of_collective(event(collective=Collective(name))) for name in names.split()}
    assert found == dict.fromkeys(names.split(), kind)


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


def test_bytes_of_types_are_those_of_torch():
    types = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    known = {name: dtype.itemsize for name, dtype in types.items() if element_bytes(name) is not None}
    assert len(known) > 15 and {name: element_bytes(name) for name in known} == known
    scalar_types = {
        "BFloat16": 2,
        "Float": 4,
        "Float8_e5m2": 1,
        "Long": 8,
        "ComplexDouble": 16,
        "": None,
        "QInt8": None,
    }
    assert {name: element_bytes(name) for name in scalar_types} == scalar_types


@pytest.mark.parametrize("collective,number", [
    *((Collective(name, in_elems=100, out_elems=700, dtype="Half"), 1400 if "gather" in name else 200) for name in (
        "allreduce", "_reduce_scatter_base", "_allgather_base", "all_to_allv", "gather", "scatter", "send")),
    (Collective("recv", in_elems=0, out_elems=5, dtype="Float"), 20),
    (Collective("allreduce", in_elems=7, dtype="QInt8"), None), (Collective("barrier", in_elems=7), None),
    (Collective("all_gather", in_elems=7, dtype="Float"), None), (None, None),
])  # fmt: skip
def test_the_side_whose_bytes_count(collective, number):
    assert bytes_of(event(collective=collective)) == number
    assert bytes_of(event("Memcpy PtoP", moved=512)) == 512


def test_groups_are_called_by_their_description():
    for group, description, name in (("3", "tp", "tp"), ("3", "undefined", "3"), ("3", "", "3")):
        assert group_name(Collective("allreduce", group, description)) == name
