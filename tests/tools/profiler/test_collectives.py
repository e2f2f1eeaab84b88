"""The kind of a collective, from its recorded name or from that of its kernel."""

import pytest

from moe_dualpipe.tools.profiler.collectives import kind_of_collective
from moe_dualpipe.tools.profiler.trace import Collective, DeviceEvent


def event(name="ncclDevKernel_SendRecv(x)", collective=None):
    return DeviceEvent(name, "kernel", 0.0, 10.0, "0", "20", None, 1, 0, collective)


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
