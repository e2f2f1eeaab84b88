"""Short names of kernels, from real traces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler.kernel_names import short_name, shortened


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


def test_shortened():
    assert [shortened("dispatch", letters) for letters in (9, 8, 7, 3, 2, 0, -1)] == [
        "dispatch", "dispatch", "dispat…", "di…", "", "", "",
    ]  # fmt: skip
