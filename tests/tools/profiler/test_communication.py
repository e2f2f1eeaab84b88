"""Which kernels and copies are communication: every library with names of its own, and names that are near them."""

import re

import pytest

from moe_dualpipe.tools.profiler.communication import LIBRARIES, NAMES, Names, function_name
from moe_dualpipe.tools.profiler.trace import DeviceEvent


def kind_of(name, category="kernel", names=NAMES):
    return names.kind_of(DeviceEvent(name, category, 0, 1, "0", "7", None, 1))


# Full names as they are in traces, and names of computation that look like them.
KERNELS = {
    "NCCL, RCCL, MSCCL": (
        ["ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclW)",
         "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
         "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)", "rcclGenericKernel<1>"],
        ["void my::gemm<ncclDataType_t>(int)", "void syncclocks_kernel(int)", "nonccl_add", "void norm(ncclComm*)"],
    ),
    "NVSHMEM, rocSHMEM": (
        ["nvshmemi_proxy_rma_entrypoint(void*)", "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)2>(int)",
         "void rdxn_on_stream_kernel<float, 0>(int)", "rocshmem::rocshmem_wg_init"],
        ["void noise_on_stream_kernel(int)", "sync_on_stream_kernels_of_mine", "wait_on_stream_kernel",
         "void fill<nvshmem_team_t>(int)"],
    ),
    "DeepEP, UCCL": (
        ["void deep_ep::legacy::internode_ll::dispatch<true, false>(void*)", "void uccl::intranode::combine<8>(int4*)",
         "void hybrid_ep::dispatch_kernel<1>(int)", "_ZN7deep_ep9intranode15notify_dispatchILi8EEEvPKi",
         "void dpsk::ep::internode::combine<false, 8>(int4*)", "void uccl::layout::get_dispatch_layout<256>(int*)"],
        ["void deep::gemm(int)", "void step::add(int)", "void moe::dispatch<deep_ep::Buffer>(int)", "deep_episode"],
    ),
    "MORI-EP": (
        ["void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs<hip_bfloat16>)",
         "EpCombineInterNodeV1KernelLowLatency_bf16.kd", "EpDispatchCopyToStaging_f32"],
        ["StepDispatchKernel", "void scale<EpDispatch>(int)", "EpochCombine", "mori_cast_float_to_fp4"],
    ),
    "pplx-garden, pplx-kernels": (
        ["void a2a_dispatch_send_kernel<16u, 8u>(unsigned long)", "void a2a_combine_recv_kernel<16u>(unsigned long)",
         "void (anonymous namespace)::dispatchKernel<10u, true, false>(int*)", "void pplx::intranode::combine(int)"],
        ["void my::dispatchKernel<10u>(int*)", "dispatchKernel", "ata2a_dispatch", "void a2a_permute_kernel(int)",
         "void simplex::solve(int)"],
    ),
    "PyTorch symmetric memory": (
        ["void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
         "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int)",
         "void one_shot_all_reduce_kernel<float, 16, 8>(float**)", "c10d::nvshmem_extension::allToAllV(long*)"],
        ["void asymmetric_memory_fill(int)", "void none_shot_x(int)", "void sum<c10d::symmetric_memory::Pad>(int)"],
    ),
    "all-reduce of vLLM, SGLang, AITER": (
        ["void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
         "void sglang::cross_device_reduce_2stage<__half, 4>(sglang::RankData*)",
         "void aiter::cross_device_reduce_2stage_naive<bf16, 8>(int)"],
        ["void cross_device_reduce(int)", "void across_device_reduce_1stage_x(int)",
         "void vllm::rms_norm_kernel<cross_device_reduce_1stage>(int)"],
    ),
    "Transformer Engine": (
        ["void userbuffers_fp16_sum_inplace_gpu_rw<4>(int)", "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)"],
        ["void init_userbuffers(int)", "userbuffer_fill", "void copy<userbuffers_args>(int)"],
    ),
    "TensorRT-LLM": (
        ["void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8, false, false, false>(int const*)",
         "tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel(int)", "moeA2ADispatchKernel(int const*)",
         "void tensorrt_llm::kernels::moeCommKernel(int)"],
        ["void moePermuteKernel(int)", "void finalizeMoeRoutingKernel<moe_comm::Args>(int)", "somemoeA2A"],
    ),
    "oneCCL": (
        ["AllreduceLargeKernel_GlobalSync<sycl::half>", "_ZTS22Allreduce_small_kernelIfLm1EE", "oneccl_allreduce_pcie",
         "Kernel_local_sum_and_distribute_to_remote_ranks<float, 1ul>", "NoCopyKernel_all_sum<float>",
         "ReduceScatterMediumKernel_local_copy<float, 1ul>", "AllgathervMediumKernel_LocalSync<float>"],
        ["Kernel_compute_gelu", "Kernel_all_summary", "gemm_Kernel_2rank_update", "acccl::add", "_ZTS9VectorAdd",
         "_ZTSN2at3AddE"],
    ),
    "moe-dualpipe": (
        ["push_kernel", "receive_rows_kernel", "receive_sums_kernel", "release_kernel", "wait_for_ranks_kernel"],
        ["push_kernel_v2", "my_push_kernel", "receive_kernel", "wait_kernel", "void a::release_kernel(int)"],
    ),
    "any collective in the function's own name": (
        ["void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>(int)",
         "moeAllToAllKernel", "quickreduce::allreduce_prototype_twoshot", "AllGatherKernel", "my_reduce_scatter_kernel",
         "custom_all_to_all", "SendRecvKernel"],
        ["triton_poi_fused_all_reduce_add_0", "triton_red_fused_all_gather_sum_3", "triton_tem_fused_all_to_all_mm_2",
         "triton_per_fused_reduce_scatter_1", "gemm_all_reduce_kernel", "fused_matmul_reduce_scatter",
         "void cutlass::all_gather_GEMM<1>(int)",
         "void at::native::elementwise_kernel<my::all_reduce_functor>(int)", "void small_reduce(int)", "hallgather",
         "void all_reduce_utils::scale(int)", "reduce_kernel", "gather_scatter", "resend_recvd"],
    ),
}  # fmt: skip


def test_every_library_has_names():
    assert [*KERNELS] == [library.name for library in LIBRARIES]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_kernels_of_a_library(library):
    found, near = KERNELS[library.name]
    for name in [*found, *library.examples]:
        assert re.search(library.pattern, function_name(name)), f"{library.name}: {name}"
        assert kind_of(name) == "comm", name
    for name in near:
        assert kind_of(name) == "compute", name


@pytest.mark.parametrize("name,category,kind", [
    ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", "comm"), ("[CUDA memcpy Peer-to-Peer]", "gpu_memcpy", "copy"),
    ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "copy"), ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", "copy"),
    ("CopyDeviceToDevice", "gpu_memcpy", "copy"), ("Memset (Device)", "gpu_memset", "copy"),
    ("__amd_rocclr_copyBuffer.kd", "kernel", "copy"), ("__amd_rocclr_fillBufferAligned.kd", "kernel", "copy"),
    ("memcpy32_post", "kernel", "copy"), ("Memcpy MtoPtoPX", "gpu_memcpy", "copy"),
])  # fmt: skip
def test_copies(name, category, kind):
    """AMD's tracer calls copies within a GPU and between GPUs the same, so they are copies, unless --comm says more."""
    assert kind_of(name, category) == kind


def test_copies_between_amd_gpus_can_be_named():
    assert kind_of("Memcpy DtoD (Device -> Device)", "gpu_memcpy", Names(comm="Memcpy DtoD")) == "comm"
    assert kind_of("CopyDeviceToDevice", "gpu_memcpy", Names(comm="CopyDeviceToDevice")) == "comm"
