"""The category of a kernel, by its name: real names, and names that are nearly the same."""

import pytest

from moe_dualpipe.tools.profiler.categories import (
    CATEGORIES,
    KERNEL_CATEGORIES,
    OTHER,
    ROWS,
    category_of,
    category_of_kernel,
    words,
)
from moe_dualpipe.tools.profiler.communication import NAMES
from moe_dualpipe.tools.profiler.pictures.lanes_image import CATEGORY_COLORS
from moe_dualpipe.tools.profiler.trace import DeviceEvent


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
        assert category_of(event, NAMES.kind_of(event)) == category


@pytest.mark.parametrize(("name", "found"), [
    ("cunn_SoftMaxForward", "cunn soft max forward"), ("fmhaSm100aKernel_QkvE4m3", "fmha sm 100 a kernel qkv e 4 m 3"),
    ("FusedAddRMSNormKernel", "fused add rms norm kernel"), ("gemv2T_kernel_val", "gemv 2 t kernel val"), ("", ""),
    ("CUDAFunctor_add<float>", "cuda functor add float"),
])  # fmt: skip
def test_words_of_a_name(name, found):
    assert words(name) == found


def test_each_category_of_kernels_has_a_color():
    assert {*CATEGORY_COLORS} == {*KERNEL_CATEGORIES}
    assert {*CATEGORIES} - {*KERNEL_CATEGORIES} == {
        "communication", "communication on a copy engine", "copy", "other",
    }  # fmt: skip
