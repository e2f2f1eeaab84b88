"""Tell what kind of work a kernel does, by the words of its name, and shorten names.

A trace has only names. ROWS is an ordered table, and the first row that matches decides. Its pattern is searched in the
words of the kernel's own function, so that "add" is not found in "padding", and template arguments do not count. If the
function says nothing, as in `cutlass::device_kernel<...>`, the words of the whole name are searched; if no row matches,
those of the namespaces. torch.compile names a kernel after all operators that it fuses, so its prefix counts first.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from ...messages import printable
from .communication import function_name
from .trace import PEER_COPY, DeviceEvent

COMMUNICATION, COPY_ENGINE, COPY, OTHER = "communication", "communication on a copy engine", "copy", "other"


class Row(NamedTuple):
    """Kernels of one category."""

    category: str
    pattern: str
    """A regular expression of whole words in lower case with a space between two: "layer norm", "top k"."""
    examples: tuple[str, ...]
    source: str
    """Where these names are defined or shown."""
    whole: str = ""
    """Words that must also be in the whole name, with its template arguments; "" for none."""


_PRODUCT = r"(?!fb)[a-z]{0,2}gemm[a-z]?|gemv[a-z]*|(?:b|add|badd|baddb)?mm|matmul|einsum|(?<!upsample )linear|fc"
_PRODUCT += r"|nvjet|marlin|wv split k"
_NORM = r"(?<=\w )(?<!vector )(?<!lp )norm|normalization|(?:layer|rms|batch|group|instance)norm"
_SOFTMAX = r"(?:log ?)?soft ?max|cross entropy|nll loss"
_ATEN = "pytorch/pytorch aten/src/ATen/native/cuda"
_INDUCTOR = "pytorch/pytorch torch/_inductor/codegen/triton.py"

ROWS = (
    Row("normalization", rf"^triton (?:red|per)\b.*\b(?:{_NORM}|mean\b.*\bpow\b.*\brsqrt)",
        ("triton_red_fused_add_native_layer_norm_3", "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_7"), _INDUCTOR),
    Row("softmax and loss", rf"^triton (?:red|per)\b.*\b(?:{_SOFTMAX})",
        ("triton_red_fused__log_softmax_nll_loss_forward_2",), _INDUCTOR),
    Row("elementwise", "^triton (?:poi|for)", ("triton_poi_fused_add_native_layer_norm_sum_0",), _INDUCTOR),
    Row("reduction", "^triton (?:red|per|spl)", ("triton_red_fused_abs_amax_1", "triton_per_fused_addmm_sum_4"),
        _INDUCTOR),
    Row("embedding",
        r"(?:split )?embedding (?:bag|forward|backward|codegen|dense)|split eb|embedding$|pooled embs?|linearize index"
        r"|rowwise to float|krn partials?|compute grad weight|sum and scatter",
        ("split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1", "aten::embedding",
         "embedding_backward_feature_kernel", "EmbeddingBag_updateOutputKernel_sum_mean", "permute_pooled_embs_kernel",
         "linearize_index_kernel", "fbgemm_gpu::_FP8rowwise_to_float_cuda_kernel"),
        f"pytorch/FBGEMM fbgemm_gpu; {_ATEN}/Embedding.cu"),
    Row("optimizer", "multi tensor apply",
        ("multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>",
         "multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float, (NormType)1>>"),
        f"{_ATEN}/MultiTensorApply.cuh; NVIDIA/apex csrc/multi_tensor_apply.cuh",
        whole=r"adamw?|adagrad|lamb|sgd|novograd|lars|(?:lp|l 2) ?norm|addc(?:mul|div)|pointwise op|lerp|axpby|scale"),
    Row("optimizer", r"adamw?|adagrad|lamb|sgd|novograd|lars|muon|newton schulz|optimizer|lp ?norm cleanup",
        ("kOptimizer32bit1State", "aten::_fused_adamw_", "adam_cuda_kernel"),
        "bitsandbytes-foundation/bitsandbytes csrc/kernels.cu; NVIDIA/apex csrc/fused_adam_cuda_kernel.cu"),
    Row("elementwise", "rotary|rope|multi tensor apply",
        ("vllm::rotary_embedding_kernel", "transformer_engine::fused_rope_forward_kernel",
         "multi_tensor_apply_kernel<TensorListMetadata<2>, UnaryOpFunctor<long, 2, 1, 1>, Copy<long, long>>"),
        "vllm-project/vllm csrc/pos_encoding_kernels.cu; NVIDIA/TransformerEngine common/fused_rope"),
    Row("data movement",
        r"(?:reshape and|concat and|store|set|copy|append|write)(?: \w+)? (?:(?:kv ?)?cache|kv buffer)"
        r"|(?:kv|page) indices",
        ("vllm::reshape_and_cache_flash_kernel", "store_kvcache", "create_flashinfer_kv_indices_triton"),
        "vllm-project/vllm csrc/cache_kernels.cu; sgl-project/sglang python/sglang/srt/layers/attention/utils.py"),
    Row("attention",
        r"flash|fmha|\w?sdpa|attn|attention|mla|mha|mqa|delta rule|sage (?:fwd|bwd)|scaled dot product|bwd kernel d[kq]"
        r"|merge states?|(?:prefill|decode) with (?:paged )?kv cache|fwd (?:grouped )?kernel stage [12]"
        r"|reduce segments",
        ("flash_fwd_splitkv_kernel", "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>()",
         "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128_4x1x1_cga1x1x1_kernel0_0",
         "fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "aiter::fmha_fwd_hd128_bf16_rtz", "kernel_unified_attention_3d",
         "void ck_tile::kentry<256, 1, ck_tile::FmhaFwdKernel<int>>()", "bwd_kernel_dk_dv", "reduce_segments",
         "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausal", "flashinfer::BatchDecodeWithPagedKVCacheKernel",
         "_fwd_grouped_kernel_stage1"),
        "Dao-AILab/flash-attention csrc/flash_attn/src and hopper; ROCm/aiter; ROCm/aotriton; "
        "flashinfer-ai/flashinfer include/flashinfer/attention; vllm-project/vllm"),
    Row("convolution",
        r"conv(?:olution|olve|transpose)?|[dw]grad|fprop|scudnn|\d+ cudnn|winograd|igemm (?:fwd|bwd|wrw)|implicit gemm"
        r"|im (?:2 d )?2 col|col 2 im|cask cudnn|fft 2 d",
        ("cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1", "implicit_convolve_sgemm", "Im2d2Col_v2",
         "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x64x64_stage4",
         "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8", "causal_conv1d_fwd_kernel", "aten::conv2d",
         "kernel_grouped_conv_fwd_xdl_cshuffle_v3", "cudnn::winograd_nonfused::winogradForwardData4x4"),
        "cuDNN, in traces of AMD-AGI/TraceLens; ROCm/MIOpen src/kernels; ROCm/composable_kernel"),
    Row("routing",
        r"top ?k|gating|rout(?:ing|er|e)|moe (?:align|sort|sum|combine|dispatch)\w*|(?:count|compute) expert"
        r"|expert tokens?|^finalize|bitmatrix|\w+ (?:un)?permute|(?:un)?permute \w+|sort(?:ing)?|\w*radix\w*|argsort"
        r"|bitonic\w*|histogram|bincount|unique|searchsorted|bucketize|^index|index (?:select|put|add|copy)"
        r"|(?:gather|scatter)(?! gemm)|nonzero|device (?:select|compact)|row id map|fused mapping|expand to fused"
        r"|^reduce fused|aux fi|dot rows|sum rows|tile table|count kernel",
        ("vllm::moe::topkGatingSoftmax<4, 64>", "moe_align_block_size_kernel", "moe_sum_kernel<BF16>", "gatherTopK",
         "moe::dev::routing::routingIndicesHistogramKernel", "finalizeMoeRoutingKernel", "_topk_forward",
         "_row_id_map_pass_1_kernel", "transformer_engine::moe_unpermute_kernel", "indexSelectLargeIndex",
         "void cub::DeviceRadixSortOnesweepKernel<int>()", "at::native::vectorized_gather_kernel", "gather_rows_kernel",
         "_scatter_gather_elementwise_kernel", "cuda::expand_to_fused_with_scales_impl", "count_kernel"),
        "vllm-project/vllm csrc/moe; NVIDIA/TensorRT-LLM cpp/tensorrt_llm/kernels; NVIDIA/TransformerEngine "
        "common/permutation; deepseek-ai/profile-data; kernels/gpu"),
    Row("softmax and loss", rf"{_SOFTMAX}|logsumexp|\w*loss|bce with logits",
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForwardReg<float>()", "softmax_warp_backward",
         "transformer_engine::scaled_upper_triang_masked_softmax_warp_forward", "liger_cross_entropy_kernel",
         "nll_loss_forward_reduce_cuda_kernel_2d"),
        f"{_ATEN}/SoftMax.cu, Loss.cu; NVIDIA/TransformerEngine common/fused_softmax"),
    Row("grouped GEMM", _PRODUCT,
        ("void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::GemmKernel>()",
         "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<int>>>()",
         "void ck_tile::kentry<1, ck_tile::GroupedGemmKernel<int>>()", "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1"),
        "NVIDIA/cutlass include/cutlass/gemm; ROCm/composable_kernel; triton-lang/triton python/triton_kernels; "
        "deepseek-ai/profile-data",
        whole=r"group(?:ed)? (?:gemm|mm|problem)|m grouped|f?moe|ogs|experts?"),
    Row("grouped GEMM",
        r"moe (?:fused|stage|mlp|kernel)|fused moe|fmoe|rows times weights|weight gradients kernel"
        r"|swiglu (?:up|down backward) kernel",
        ("fused_moe_kernel", "ck_moe_stage1_kernel<BF16, 128, 128>", "aiter_fused_moe_kernel_bf16",
         "rows_times_weights_kernel", "weight_gradients_kernel", "swiglu_up_kernel", "fp8_rows_times_weights_kernel"),
        "vllm-project/vllm vllm/model_executor/layers/fused_moe; ROCm/aiter; kernels/gpu"),
    Row("GEMM", rf"{_PRODUCT}|cijk|split ?k ?reduce",
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "ampere_sgemm_128x64_nn", "aten::linear",
         "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x6_tn_align8>()",
         "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
         "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16", "deep_gemm::sm90_fp8_gemm_1d2d_impl<0u>",
         "std::enable_if<!(false), void>::type internal::gemvx::kernel<int>", "triton_tem_fused_addmm_0",
         "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2", "void cublasLt::splitKreduce_kernel<32>()",
         "autograd::engine::evaluate_function: AddmmBackward0"),
        "NVIDIA/cutlass; deepseek-ai/DeepGEMM; ROCm/hipBLASLt; cuBLAS, in traces of AMD-AGI/TraceLens"),
    Row("GEMM", r"\w+", ("void epilogue::impl::globalKernel<float, cublasLtEpilogue_t>()",),
        "cuBLAS, in traces of facebookresearch/HolisticTraceAnalysis", whole="cublas(?: lt)?"),
    Row("normalization",
        rf"{_NORM}|bn (?:fw|bw)|ln (?:fwd|bwd)|gamma beta|rowwise moments|compute (?:backward )?fused params"
        r"|compute internal gradients",
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>()", "cuComputePartGradGammaBeta",
         "vllm::fused_add_rms_norm_kernel", "flashinfer::norm::FusedAddRMSNormKernel", "MIOpenBatchNormFwdTrainSpatial",
         "cudnn::bn_fw_tr_1C11_singleread", "layer_norm::ln_fwd_kernel", "GammaBetaBackwardSimpleCUDAKernel",
         "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256E", "cuApplyLayerNorm", "RowwiseMomentsCUDAKernel"),
        f"{_ATEN}/layer_norm_kernel.cu; NVIDIA/apex csrc/layer_norm_cuda_kernel.cu; ROCm/MIOpen src/kernels"),
    Row("data movement", r"\w*elementwise",
        ("at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
         "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"),
        f"{_ATEN}/Copy.cu, FillKernel.cu", whole="copy kernel|fill functor"),
    Row("elementwise",
        r"\w*elementwise|[a-z]*glu|[a-z]*relu|gelu|silu|sigmoid|tanh|softplus|act(?:ivation)?|add|r?sub|mul|div(?:ide)?"
        r"|neg|abs|exp|log|r?sqrt|pow|sin|cos|reciprocal|clamp|clip|where|threshold|cast|\w*quant\w*|qparams?|dropout"
        r"|bernoulli|uniform|normal|rand\w*|distribution|arange|scale|lerp|eq|ne|lt|le|gt|ge|logical"
        r"|bitwise|nan to num|upsample\w*|interpolate|accumulate grad",
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>()",
         "cuda::swiglu_forward_with_weight_and_per_token_cast_to_fp8_with_channels_impl", "fused_dropout_kernel_vec",
         "transformer_engine::cast_transpose_fused_kernel_notaligned", "vllm::scaled_fp8_quant_kernel_strided",
         "at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel", "SubTensorOpWithScalar1d",
         "vllm::act_and_mul_kernel", "quantize_rows_kernel", "swiglu_round_kernel", "swiglu_backward_kernel"),
        f"{_ATEN}/CUDALoops.cuh; vllm-project/vllm csrc; deepseek-ai/profile-data; kernels/gpu"),
    Row("reduction",
        r"reduce\w*|\w*sum|mean|a?max|a?min|arg ?max|arg ?min|prod|var|std|norm|scan|pool|\w*pooling|average"
        r"|offsets range",
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>()",
         "void cub::DeviceScanKernel<int>()", "max_pool_forward_nchw", "sum_partials_kernel", "aten::cumsum"),
        f"{_ATEN}/Reduce.cuh; NVIDIA/cccl cub"),
    Row("data movement",
        r"cat\w*|copy|memcpy|memset|fill|transpose|pad|clone|contiguous|(?:un)?pack|split|to"
        r"|zero|zeros|ones|empty|full|view|reshape|slice|chunk|expand|(?:un)?squeeze|detach|flatten|item|stack"
        r"|pin memory|record stream|cache|swizzle|repeat|permute|select|resolve",
        ("CatArrayBatchedCopy_aligned16_contig", "batched_transpose_64x64_pack_4x4_ediv_4x4_bf16", "aten::_to_copy",
         "void cudnn::engines_precompiled::nchwToNhwcKernel<float>()", "dpsk::grouped_gemm::cuda::utils::transpose"),
        f"{_ATEN}/Shape.cu; ROCm/MIOpen src/kernels"),
)  # fmt: skip
"""In the order in which they are tried."""

_MAY_COMMUNICATE = re.compile(r"\b(?:dispatch|combine|all ?to ?all|send|recv|put|get|a 2 ?a)\b")
_COMPUTE_FOR_SURE = "attention", "GEMM", "grouped GEMM"

_ROWS = [(row, re.compile(rf"\b(?:{row.pattern})\b"), re.compile(rf"\b(?:{row.whole})\b")) for row in ROWS]
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SAYS_NOTHING = re.compile(r"(?:cutlass|device|global|k?entry|kernel|launch|trampoline|agent|enable if|invoke|\d| )*")
_WRAPPERS = re.compile(r"(?i)(device_|global_?)?kernel\d?|enable_sm\w+|_?Kernel|launch_kernel|invoke\w*|entry")
"""Functions that say nothing: what they run is their first template argument."""
_AUTOGRAD = "autograd::engine::evaluate_function: "
_LONGEST = 4000  # longer names are cut: they need not be parsed


def category_of(event: DeviceEvent) -> str:
    """The category of a device event: one of CATEGORIES."""
    if event.kind == "comm":
        return COPY_ENGINE if event.category in ("gpu_memcpy", PEER_COPY) else COMMUNICATION
    return COPY if event.kind == "copy" else category_of_kernel(event.name)


@lru_cache(maxsize=1 << 16)
def category_of_kernel(name: str) -> str:
    """The category of a kernel or operator that computes; "other" if no row matches."""
    name = re.sub(r"\s*\[clone [^]]*\]|\.kd$", "", name[:_LONGEST])
    function, whole = function_name(name), words(name)
    own = words(function.rsplit("::", 1)[-1])
    for searched in (whole if _SAYS_NOTHING.fullmatch(own) else own, words(function)):
        for row, pattern, more in _ROWS:
            if pattern.search(searched) and (not row.whole or more.search(whole)):
                return row.category
    return OTHER


@lru_cache(maxsize=1 << 16)
def may_communicate(name: str) -> bool:
    """Whether the name of a kernel that counts as computation sounds like a transfer, as of an unknown library."""
    function = function_name(name)
    if function.startswith(("at::", "triton_")) or category_of_kernel(name) in _COMPUTE_FOR_SURE:
        return False
    return _MAY_COMMUNICATE.search(words(function.rsplit("::", 1)[-1])) is not None


def words(name: str) -> str:
    """The words and numbers of a name, in lower case: "cunn_SoftMaxForward2d" -> "cunn soft max forward 2 d"."""
    return " ".join(_WORD.findall(name)).lower()


@lru_cache(maxsize=1 << 16)
def short_name(name: str) -> str:
    """A short name for labels: the function's own, without return type, namespaces and arguments.

    void at::native::elementwise_kernel<128, 4, ...>(int, ...)             elementwise_kernel
    void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_f16_256x128>(...)  cutlass_80_tensorop_s16816gemm_f16_256x128
    _ZN2at6native13reduce_kernelILi512E...                                  reduce_kernel
    autograd::engine::evaluate_function: AddmmBackward0                     AddmmBackward0
    ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)      ncclDevKernel_AllReduce_Sum_bf16_RING_LL

    A name that has no known form is cut.
    """
    text = name[:_LONGEST].strip().removeprefix(_AUTOGRAD).removesuffix(".kd")
    if text.startswith(("_Z", "void ")) or "(" in text or "<" in text:
        *spaces, own = function_name(text).split("::")
        _, _, arguments = text.partition("<")
        inside = re.split(r"[,>]", short_name(arguments))[0].strip() if arguments and _WRAPPERS.fullmatch(own) else ""
        text = inside if len(inside) > 8 else "::".join([*spaces[-1:], own]) if _WRAPPERS.fullmatch(own) else own
    return printable(text or name, 200)
