"""Names of kernels and copies: which library's communication, which collective, which category, and short forms."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler.categories import (
    OTHER,
    ROWS,
    category_of,
    category_of_kernel,
    short_name,
)
from moe_dualpipe.tools.profiler.communication import LIBRARIES, NAMES, Names, function_name, kind_of_collective
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.pictures.lanes import CATEGORY_COLORS
from moe_dualpipe.tools.profiler.trace import Collective, DeviceEvent
from tests.support.traces import kernel, write

# ---- Which kernels and copies are communication: names of every library, and names that are near them ----


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
    "NIXL-EP, Mooncake": (
        ["void nixl_ep::ht::dispatch<false, 8>(int4*)", "void mooncake::dispatch<true, 4>(void*, float*)",
         "mooncake::mark_phase_ack_kernel(void*)"],
        ["void phoenixl_ep::dispatch(int)", "void my::combine<mooncake::Buffer>(int)", "mooncake_gelu"],
    ),
    "Triton-distributed": (
        ["kernel_combine_token_intra_node", "dispatch_kernel_v2", "kernel_pre_attn_qkv_pack_a2a", "p2p_put_kernel",
         "kernel_get_dispatch_send_reqs", "barrier_all_intra_node_kernel", "_forward_push_2d_ll_kernel"],
        ["mega_kernel_dispatch_token_moe_grouped_gemm", "dispatch_kernel_v20", "kernel_gqa_fwd_batch_decode_combine_kv",
         "swiglu_forward_kernel", "forward_push"],
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


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_kernels_of_a_library(library):
    found, near = KERNELS[library.name]
    for name in [*found, *library.examples]:
        assert re.search(library.pattern, function_name(name)), f"{library.name}: {name}"
        assert kind_of(name) == "comm", name
    for name in near:
        assert kind_of(name) == "compute", name


@pytest.mark.parametrize("name,remarked", [
    *((name, True) for name in ("void mine::dispatch<8>(int)", "ep_combine_rows", "my_a2a_kernel", "put_rows",
                                "ringSendKernel")),
    *((name, False) for name in (
        "at::native::index_put_kernel(int)", "flash_fwd_splitkv_combine_kernel", "triton_poi_fused_index_put_0",
        "target_kernel", "gemm_send_kernel", "nixl_ep::dispatch",
    )),
])  # fmt: skip
def test_computation_that_is_named_like_a_transfer_is_remarked(name, remarked, tmp_path):
    """With its time and the option that makes it communication; not if the user has said that it computes."""
    path = write(tmp_path / "t.json", [kernel(name, 0, 1234), kernel("gemm", 2000, 10)])
    [device] = analyze_files([path]).devices
    if not remarked:
        assert not device.remarks
        return
    [sentence] = device.remarks
    assert "(1,234 us)" in sentence
    [told] = analyze_files([path], Names(comm=sentence.split("'")[1])).devices
    assert not told.remarks and (told.analysis.num_comm, device.analysis.num_comm) == (1, 0)
    assert not analyze_files([path], Names(compute=".")).devices[0].remarks


@pytest.mark.parametrize("name,category,kind,comm", [
    *((*row, None) for row in (
        ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", "comm"), ("[CUDA memcpy Peer-to-Peer]", "gpu_memcpy", "copy"),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "copy"), ("Memset (Device)", "gpu_memset", "copy"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", "copy"), ("CopyDeviceToDevice", "gpu_memcpy", "copy"),
        ("__amd_rocclr_copyBuffer.kd", "kernel", "copy"), ("__amd_rocclr_fillBufferAligned.kd", "kernel", "copy"),
        ("memcpy32_post", "kernel", "copy"), ("Memcpy MtoPtoPX", "gpu_memcpy", "copy"),
    )),
    ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "comm", "Memcpy DtoD"),
    ("CopyDeviceToDevice", "gpu_memcpy", "comm", "CopyDeviceToDevice"),
])  # fmt: skip
def test_copies(name, category, kind, comm):
    """AMD's tracer calls copies within a GPU and between GPUs the same, so they are copies, unless --comm says more."""
    assert kind_of(name, category, Names(comm)) == kind


# ---- The kind of a collective, from its recorded name or from that of its kernel ----


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


# ---- The category of a kernel: real names, and names that are nearly the same ----


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.category}: {row.pattern[:30]}")
def test_examples_of_a_row(row):
    """No row before it takes its examples."""
    assert row.examples and row.source
    assert {name: category_of_kernel(name) for name in row.examples} == dict.fromkeys(row.examples, row.category)


# Names from published traces and sources. Each differs in a word from one of another category.
NAMES_OF_KERNELS = {
    # template arguments name other operators
    "void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel_cuda(at::TensorIteratorBase&)>()":
        "elementwise",
    "void at::native::elementwise_kernel<128, 2, at::native::(anonymous namespace)::GroupNormKernelImplInternal>":
        "elementwise",
    "void at::native::(anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out()>()":
        "elementwise",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>()":
        "data movement",
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<index_put_kernel_impl>>()":
        "routing",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>()": "reduction",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<3>, "
    "FusedSgdMathFunctor<float, 3>>()": "optimizer",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, "
    "BinaryOpScalarFunctor<float, 2, 1, 1>, std::plus<float>>()": "elementwise",
    # torch.compile names a kernel after all operators that it fuses
    "triton_poi_fused__scaled_dot_product_flash_attention_cat_transpose_view_10": "elementwise",
    "triton_poi_fused_constant_pad_nd_moe_forward_0": "elementwise",
    "triton_red_fused_add_addmm_mul_native_layer_norm_split_unsqueeze_19": "normalization",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1": "normalization",
    "triton_red_fused__to_copy_add_mean_mul_neg_stack_transpose_14": "reduction",
    "triton_per_fused__softmax_add_2": "softmax and loss",
    "triton_tem_fused_bmm_3": "GEMM",
    # one word makes the difference
    "vllm::rotary_embedding_kernel": "elementwise",
    "embedding_dense_backward_kernel": "embedding",
    "vllm::reshape_and_cache_flash_kernel": "data movement",
    "flash_fwd_splitkv_combine_kernel": "attention",
    "vllm::moe::topkGatingSoftmax": "routing",
    "scaled_masked_softmax_warp_forward": "softmax and loss",
    "split_embedding_backward_codegen_rowwise_adagrad_weighted_kernel_warp_per_row_1": "embedding",
    "adagrad_update_kernel": "optimizer",
    "cask_cudnn::computeOffsetsKernel": "convolution",
    "fbgemm_gpu::_offsets_range_cuda_kernel": "reduction",
    "routingIndicesOffsetsKernel": "routing",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1": "GEMM",
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16": "convolution",
    "kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle": "convolution",
    "aiter::fmoe_gemm_bf16": "grouped GEMM",
    "aiter::fmoe_fp8_g1u1_subGU_256": "grouped GEMM",
    "_finalize_matmul_scatter_bf16": "routing",
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu": "grouped GEMM",
    "dpsk::grouped_gemm::cuda::utils::transpose": "data movement",
    "void cudnn::engines_precompiled::nhwcToNchwKernel<float>()": "data movement",
    "cuda::per_token_cast_to_fp8_with_channels": "elementwise",
    "cuda::reduce_fused_impl": "routing",
    "reduce_1Block_kernel": "reduction",
    "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float>>()": "GEMM",
    "vector_norm_float_order-dtype_Float": "reduction",
    "native_layer_norm-dtype_Float": "normalization",
    "upsample_linear1d_out_frame": "elementwise",
    "aten::permute": "data movement",
    "moe_permute_kernel": "routing",
    "void ck_tile::kentry<1, ck_tile::Rmsnorm2dFwd<ck_tile::Rmsnorm2dFwdPipelineOnePass<int>>>()": "normalization",
    "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
    "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>()": "normalization",
    "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefill": "attention",
    "Cijk_Ailk_Bljk_BBS_BH_MT128x64x64_MI32x32x8x1_SN_1LDSB0_APM1.kd": "GEMM",
    "attn_fwd.kd": "attention",
    "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_interior_nhwc_tn_v1": "convolution",
    "void at::native::(anonymous namespace)::krn_partials_per_segment<long>(long*, long const*, long)": "embedding",
    "void at::native::(anonymous namespace)::compute_grad_weight<float, long>(long const*)": "embedding",
    "void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*)": "embedding",
    "void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float>(float const*)": "optimizer",
    "set_mla_kv_buffer_kernel": "data movement", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "attention",
    "deep_gemm::sm90_fp8_paged_mqa_logits": "attention", "void flash::get_mla_metadata_kernel()": "attention",
    "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(int)": "GEMM", "void marlin::Marlin<256, 1>()": "GEMM",
    "void marlin_moe_wna16::Marlin<256, 1>()": "grouped GEMM",
    "void cub::DeviceSelectSweepKernel<int>()": "routing", "void cub::DeviceCompactInitKernel<int>()": "routing",
    "void thrust::cuda_cub::core::_kernel_agent<thrust::cuda_cub::__reduce::ReduceAgent<int>>()": "reduction",
    # words inside longer words
    "padding_kernel": OTHER, "address_kernel": OTHER, "multiply_kernel": OTHER, "summary_kernel": OTHER,
    "enormous_kernel": OTHER, "converter_kernel": OTHER, "nonlinearity_kernel": OTHER, "embedded_kernel": OTHER,
    "reaction_kernel": OTHER, "category_kernel": "data movement", "resort_kernel": OTHER, "flashy_kernel": OTHER,
    "at::cuda::(anonymous namespace)::spin_kernel(long)": OTHER, "": OTHER, "triton__0d1d2d3d": OTHER,
}  # fmt: skip


# Operators of ATen, which are the work of a CPU, and of kernels that are named after them.
OPERATORS = {
    "elementwise": "relu gelu_backward silu glu leaky_relu_ sigmoid tanh_backward softplus activation add_ rsub mul.out"
    " div neg abs exp log sqrt rsqrt pow sin cos reciprocal clamp clip where threshold_backward native_dropout"
    " bernoulli_ uniform_ normal_ randn distribution arange lerp_ eq ne lt.Scalar le gt ge logical_and bitwise_or"
    " nan_to_num upsample_bilinear2d interpolate quantize_per_tensor scale_ choose_qparams AccumulateGrad",
    "reduction": "sum mean amax max min amin argmax argmin prod var std cumsum max_pool2d adaptive_avg_pool2d norm"
    " mloPooling average",
    "data movement": "cat copy_ memset fill_ transpose pad clone contiguous pack unpack split to zero_ zeros ones empty"
    " full view reshape slice chunk expand unsqueeze squeeze detach flatten item stack pin_memory record_stream repeat"
    " select resolve_conj swizzle_row_scaling_kernel cache memcpy",
    "routing": "topk sort argsort bitonicSortKVInPlace histc_histogram bincount unique2 searchsorted bucketize"
    " index_add_ select_index_put nonzero gather scatter_add_ expert_gating gating router clean_and_count_expert"
    " count_and_sort_expert_tokens computeExpertFirstTokenOffset finalizeMoeRouting assign_expert_tokens"
    " sum_bitmatrix_rows get_fused_mapping aux_fi_impl dot_rows_kernel sum_rows_kernel tile_table_kernel"
    " permute_2D_data fused_permute_with_pad RadixSelect",
    "softmax and loss": "log_softmax nll_loss_nd logsumexp mse_loss bce_with_logits binary_cross_entropy cross_entropy",
    "GEMM": "mm bmm addmm baddbmm matmul einsum linear fc gemv splitKreduce",
    "grouped GEMM": "_grouped_mm moe_matmul moe_gemv expert_linear fused_moe",
    "normalization": "native_layer_norm ln_bwd_kernel ComputeFusedParamsCUDAKernel ComputeInternalGradients"
    " groupnorm_kernel_dispatch_up",
    "optimizer": "lamb_update sgd_step novograd lars_update muon_update newton_schulz_step",
    "convolution": "dgrad_engine wgrad_alg0_engine fprop implicit_gemm col2im_kernel fft2d_r2c_32x32",
    "attention": "cudnn_sdpa mla_decode mha_fwd sage_fwd scaled_dot_product merge_states",
    "embedding": "split_eb_bwd_rowwise",
}


@pytest.mark.parametrize("category", OPERATORS)
def test_category_of_an_operator(category):
    names = OPERATORS[category].split()
    assert {name: category_of_kernel(f"aten::{name}") for name in names} == dict.fromkeys(names, category)


@pytest.mark.parametrize("name", NAMES_OF_KERNELS)
def test_category_of_a_name(name):
    assert category_of_kernel(name) == NAMES_OF_KERNELS[name]


def test_communication_and_copies_are_told_by_their_kind():
    """The word "reduce" in a transfer's name is no reduction, and a copy that a driver runs as a kernel is a copy."""
    for name, category in {
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication", "Memcpy DtoD": "copy",
        "Memcpy PtoP": "communication on a copy engine",
        "__amd_rocclr_fillBufferAligned": "copy", "void at::native::reduce_kernel<512>()": "reduction",
    }.items():  # fmt: skip
        event = DeviceEvent(name, "gpu_memcpy" if "Memcpy" in name else "kernel", 0, 1, "0", "7", None, 0)
        assert category_of(event._replace(kind=NAMES.kind_of(event))) == category


def test_each_category_of_kernels_has_a_color():
    assert {*CATEGORY_COLORS} == {row.category for row in ROWS}


# ---- Short names, from real traces ----


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<"
         "float> >(at::TensorIteratorBase&, at::native::CUDAFunctor_add<float> const&)::{lambda(int)#1}>(int, at::f)",
         "elementwise_kernel"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float, float, 9>(float*, int)",
         "softmax_warp_forward"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_f16_256x128_32x3_nn_align8>(cutlass::Params)",
         "cutlass_80_tensorop_s16816gemm_f16_256x128_32x3_nn_align8"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false>, true>(flash::Flash_fwd_params)",
         "flash_fwd_kernel"),
        ("_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT1_", "reduce_kernel"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "AddmmBackward0"),
        ("aten::mm", "aten::mm"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __half, 7>(cublasGemvParamsEx<int>)",
         "gemvx::kernel"),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 10, 11, false>(cublasGemmSmallNParams<float>)",
         "gemmSN_TN_kernel"),
        ("Cijk_Alik_Bljk_HHS_BH_MT128x128x32.kd", "Cijk_Alik_Bljk_HHS_BH_MT128x128x32"),
        ("void a::b<c<d>", "b"),
        ("", ""),
        (">>)<(", ">>)"),
            ("<(", "<("),
    ],
)  # fmt: skip
def test_known_forms(name, short):
    assert short_name(name) == short


@settings(max_examples=200, deadline=None)
@given(st.text("ab:<>(), _\n\u2028{}Z0129", max_size=60))
def test_any_text_has_a_printable_name(text):
    assert short_name(text).isprintable()
    assert bool(short_name(text)) == bool(text)
