"""Healthy programs: their communication is hidden, and their hosts are ahead of their devices.

    moe_training      two chunks through Mixture-of-Experts layers, in the order of DeepSeek's published trace, with an
                      all-to-all for dispatch and combine, and sums of gradients over a group of their own
    data_parallel     a dense backward whose gradients are summed in buckets
    pipeline          two stages that exchange activations and gradients one micro-batch ahead
    sharded           the same with sharded weights, gathered one layer ahead, and sums of gradients that are scattered
    decode            one token after another on one GPU, each one CUDA graph of short kernels
    single_gpu        forwards and backwards on one GPU, without communication

foreign: without annotations, as most programs are; their modules are recorded instead.
"""

from collections.abc import Callable

from .program import Await, Graph, Job, Kernel, Python, Record, Shares, Writer

PAIR = 0, 1
"""The ranks of every group."""

ATTENTION: Shares = (
    ("void rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16 const*, int)", "aten::rms_norm", 0.05),
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "aten::mm", 0.25),
    ("void rotary_kernel<float>(float*, float const*, int)", "aten::mul", 0.05),
    ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)",
     "aten::_flash_attention_forward", 0.45),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "aten::mm", 0.15),
    ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(float const*)", "aten::topk", 0.05),
)  # fmt: skip
ATTENTION_BACKWARD: Shares = (
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "aten::mm", 0.2),
    ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)",
     "aten::_flash_attention_backward", 0.3),
    ("void flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)",
     "aten::_flash_attention_backward", 0.1),
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "aten::mm", 0.2),
    ("void rms_norm_backward_kernel<c10::BFloat16>(c10::BFloat16*, int)", "aten::_fused_rms_norm_backward", 0.1),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "aten::add", 0.1),
)  # fmt: skip
EXPERTS: Shares = (
    ("void gather_rows_kernel<c10::BFloat16>(c10::BFloat16*, int const*, int)", "aten::index", 0.1),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<1>>>",
     "aten::_grouped_mm", 0.35),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::silu_kernel>(int)", "aten::silu", 0.1),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<2>>>",
     "aten::_grouped_mm", 0.35),
    ("void at::native::indexFuncLargeIndex<c10::BFloat16, long, unsigned int>(int)", "aten::index_add_", 0.1),
)  # fmt: skip
WEIGHTS: Shares = (
    ("nvjet_tst_256x128_64x4_2x1_v_bz_NTT", "aten::mm", 0.3),
    ("nvjet_tst_192x192_64x4_2x1_v_bz_NTT", "aten::mm", 0.4),
    ("nvjet_tst_128x128_64x4_2x1_v_bz_NTT", "aten::mm", 0.3),
)  # fmt: skip
OPTIMIZER: Shares = tuple(
    ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>(int)",
     "aten::_fused_adamw_", 0.25)
    for _ in range(4)
)  # fmt: skip


def _program(ranks: int = 2, foreign: bool = False) -> Callable[[Callable[..., None]], Callable[..., Job]]:
    """Make a job of what one rank does, for each rank. Its options get two more: seed and jitter."""

    def job_of(write: Callable[..., None]) -> Callable[..., Job]:
        def job(seed: int = 0, jitter: float = 0.03, **options: object) -> Job:
            writers = [Writer(rank, seed, jitter, foreign) for rank in range(ranks)]
            for writer in writers:
                write(writer, **options)
            return Job({w.rank: tuple(w.ops) for w in writers}, seed=seed)

        return job

    return job_of


@_program()
def moe_training(w: Writer, layers: int = 6) -> None:
    for step in w.steps(2):
        _moe_step(w, step, layers)


def _moe_step(w: Writer, step: int, layers: int) -> None:
    """Layer by layer: combine(B) | attn(F), mlp(B), dispatch(F), dispatch(B), mlp(W), mlp(F), attn(B), attn(W), ..."""
    modules = {"attn": "Attention", "mlp": "Experts", "head": "Linear", "embed": "Embedding"}

    def mark(name: str, layer: int) -> str:
        return f"{name} {step}.{layer}"

    def transfer(label: str, layer: int, after: str) -> None:
        w.transfer(label, "all_to_allv", "expert_parallel", PAIR, 560.0, "experts",
                   key=mark(label, layer), after=after)  # fmt: skip

    def wait(label: str, layer: int) -> None:
        w.ops.append(Await(f"done {mark(label, layer)} of {PAIR}"))

    def segment(label: str, us: float, layer: int, shares: Shares) -> None:
        name = label.partition("(")[0]
        grid = 132 * (2 + sorted(modules).index(name)) + (0 if "(F)" in label else 66)
        w.segment(label, f"{modules[name]}_{layer}", us, shares, grid)
        w.ops.append(Record(mark(label, layer)))

    segment("head(B)", 700, 0, WEIGHTS)
    w.ops.append(Record(mark("attn(B)", -1)))
    transfer("combine(B)", 0, mark("attn(B)", -1))
    segment("embed(F)", 500, 0, WEIGHTS)
    for layer in range(layers):
        if layer:
            wait("combine(F)", layer - 1)
        segment("attn(F)", 400, layer, ATTENTION)
        wait("combine(B)", layer)
        segment("mlp(B)", 500, layer, EXPERTS)
        transfer("dispatch(F)", layer, mark("attn(F)", layer))
        transfer("dispatch(B)", layer, mark("mlp(B)", layer))
        segment("mlp(W)", 600, layer, WEIGHTS)
        wait("dispatch(F)", layer)
        segment("mlp(F)", 450, layer, EXPERTS)
        wait("dispatch(B)", layer)
        segment("attn(B)", 900, layer, ATTENTION_BACKWARD)
        segment("attn(W)", 240, layer, WEIGHTS)
        transfer("combine(F)", layer, mark("mlp(F)", layer))
        if layer + 1 < layers:
            transfer("combine(B)", layer + 1, mark("attn(B)", layer))
        w.transfer("sum gradients", "all_reduce", "data_parallel", PAIR, 1000.0, "sums",
                   key=mark("sum", layer), after=mark("attn(W)", layer))  # fmt: skip
    segment("head(F)", 1400, layers, WEIGHTS)
    wait("combine(F)", layers - 1)
    w.ops.append(Await(f"done {mark('sum', layers - 1)} of {PAIR}"))
    w.segment("optimizer", "AdamW_0", 300, OPTIMIZER, 1056)


@_program()
def sequential_moe(w: Writer, transfer_us: float) -> None:
    """One chunk alone: nothing runs beside its transfers."""

    for layer in range(16):
        for label, us, shares, transfer in (
            ("attn(F)", 400, ATTENTION, "dispatch(F)"), ("mlp(F)", 450, EXPERTS, "combine(F)"),
        ):  # fmt: skip
            w.segment(label, "Attention_0", us, shares, 264)
            w.sent(transfer, "all_to_allv", "expert_parallel", transfer_us, f"{transfer} {layer}", "experts")
            w.ops.append(Await(f"done {transfer} {layer} of {PAIR}"))
    w.segment("head(F)", "Linear_0", 400, WEIGHTS, 264)


@_program(foreign=True)
def data_parallel(w: Writer, steps: int = 2, transfer_us: float = 700.0, at_end: bool = False) -> None:
    """A bucket is two layers. The last bucket is summed beside the backward of the embedding. at_end: all are summed at
    once, after the backward."""
    layers = 10

    for step in w.steps(steps):
        for layer in range(layers):
            w.segment("forward", f"Block_{layer}", 300, ATTENTION, 264)
        for layer in reversed(range(layers)):
            w.segment("backward", f"Block_{layer}", 600, ATTENTION_BACKWARD, 330)
            if layer % 2 == 0 and not at_end:
                w.sent("sum", "all_reduce", "data_parallel", transfer_us, f"bucket {step}.{layer}", "sums")
        w.segment("backward", "Embedding_0", 800, WEIGHTS, 396)
        if at_end:
            us = transfer_us * layers / 2
            w.sent("sum", "all_reduce", "data_parallel", us, f"bucket {step}.0", "sums")
        w.ops.append(Await(f"done bucket {step}.0 of {PAIR}"))
        w.segment("optimizer", "AdamW_0", 600, OPTIMIZER, 1056)


@_program(foreign=True)
def sharded(w: Writer, transfer_us: float = 90.0, prefetch: bool = True) -> None:
    passes = [("forward", layer) for layer in range(12)]
    passes += [("backward", layer) for layer in reversed(range(12))]

    def gather(step: int, i: int) -> None:
        w.sent("gather", "_allgather_base", "shards", transfer_us, f"weights {step}.{i}", "weights")

    for step in w.steps(2):
        gather(step, 0)
        for i, (name, layer) in enumerate(passes):
            if not prefetch and i:
                gather(step, i)
            w.ops.append(Await(f"done weights {step}.{i} of {PAIR}"))
            if prefetch and i + 1 < len(passes):
                gather(step, i + 1)
            us, shares, grid = (300, ATTENTION, 264) if name == "forward" else (600, ATTENTION_BACKWARD, 330)
            w.segment(name, f"Block_{layer}", us, shares, grid)
            if name == "backward":
                key = f"gradients {step}.{i}"
                w.sent("scatter", "_reduce_scatter_base", "shards", transfer_us, key, "gradients")
        w.segment("backward", "Embedding_0", 800, WEIGHTS, 396)
        w.ops.append(Await(f"done gradients {step}.{len(passes) - 1} of {PAIR}"))
        w.segment("optimizer", "AdamW_0", 600, OPTIMIZER, 1056)


@_program()
def pipeline(w: Writer, transfer_us: float = 120.0, ahead: int = 2) -> None:
    """Stage 0 sends activations down, stage 1 sends gradients up. What a micro-batch needs was sent `ahead` before."""

    for i in range(24):
        if i >= ahead:
            w.ops.append(Await(f"done {'BF'[w.rank]}{i - ahead} of {PAIR}"))
        for kind, us, shares, grid in (("F", 500, ATTENTION, 264), ("B", 900, ATTENTION_BACKWARD, 330)):
            w.segment(f"{w.rank}{kind}{i}", "Block_0", us, shares, grid)
            w.ops.append(Record(f"{kind}{i}"))
        for kind, source in (("F", 0), ("B", 1)):
            group, call = f"pipeline {kind}", "send" if w.rank == source else "recv"
            w.transfer(group, call, group, PAIR, transfer_us, f"pipe {kind}", key=f"{kind}{i}",
                       after=f"{kind}{i}", peers=(source, 1 - source))  # fmt: skip


@_program(ranks=1)
def decode(w: Writer, graphs: bool = True) -> None:
    kernels = tuple(
        Kernel(name, w.varied(14 * share + 3, layer, i), grid=132)
        for layer in range(12) for i, (name, _, share) in enumerate((*ATTENTION, *EXPERTS))
    )  # fmt: skip
    for token in range(8):
        with w.range(f"decode token {token}"):
            w.ops += [Python(60), *([Graph(kernels)] if graphs else kernels)]


@_program(ranks=1, foreign=True)
def single_gpu(w: Writer, steps: int = 2, small: str = "") -> None:
    """small: the optimizer has many small kernels, which are launched "together" or "alone"."""
    kernels = tuple(Kernel(OPTIMIZER[0][0], 2.0, grid=1) for _ in range(1200))

    for _ in w.steps(steps):
        for layer in range(12):
            w.segment("forward", f"Block_{layer}", 300, ATTENTION, 264)
        for layer in reversed(range(12)):
            w.segment("backward", f"Block_{layer}", 600, ATTENTION_BACKWARD, 330)
        with w.range("Optimizer.step#AdamW.step"):
            w.ops += {"alone": kernels, "together": (Graph(kernels),)}.get(small, ())
            if not small:
                w.segment("optimizer", "AdamW_0", 600, OPTIMIZER, 1056)


HEALTHY = {
    "moe": moe_training, "data parallel": data_parallel, "sharded": sharded, "pipeline": pipeline, "decode": decode,
    "one GPU": single_gpu,
}  # fmt: skip
