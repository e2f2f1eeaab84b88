"""Tell communication from computation and copies by the names of device work.

A trace does not say which kernels communicate, but their names tell: LIBRARIES is the table of known libraries. A
pattern is searched in the name of the function alone, without its return type, template arguments and parameters, which
can name anything: `at::native::elementwise_kernel<..., my::all_reduce_functor>` is computation. A kernel that
multiplies matrices and communicates at once is computation, too.

The names also tell the kind of a collective, such as "all_reduce".
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...messages import quoted
from .trace import PEER_COPY, DeviceEvent, Kind


class Library(NamedTuple):
    """Kernels of one library, or of several with the same names."""

    name: str
    pattern: str
    """Searched in the name of the kernel's function. Case counts."""
    examples: tuple[str, ...]
    """Names of functions, as a trace shows them."""
    sources: tuple[str, ...]
    """Where these names are defined: owner, repository and path on GitHub; otherwise a path in this project."""


LIBRARIES = (
    Library("NCCL, RCCL, MSCCL", r"(?:^|::)(?:nccl|rccl|msccl)",
            ("ncclDevKernel_AllGather_RING_LL", "ncclSymkDevKernel_AllReduce_AGxLL_R", "mscclKernel_Sum_half_Simple"),
            ("NVIDIA/nccl/src/device/generate.py", "ROCm/rccl/src/include/msccl/msccl_kernel.h")),
    Library("NVSHMEM, rocSHMEM",
            r"(?:^|::)(?:nvshmem|roc_?shmem)|(?:^|::)(?:barrier|sync|broadcast|fcollect|rdxn|alltoall|reducescatter)"
            r"_on_stream_kernel(?:_threadgroup)?$",
            ("nvshmemi_proxy_rma_entrypoint", "barrier_on_stream_kernel_threadgroup"),
            ("NVIDIA/nvshmem/src/include/internal/non_abi/nvshmemi_h_to_d_coll_defs.cuh",
             "NVIDIA/nvshmem/src/include/internal/non_abi/nvshmemi_h_to_d_rma_defs.cuh")),
    Library("DeepEP, UCCL", r"(?:^|::)(?:deep_ep|ep|hybrid_ep|uccl|internode|internode_ll|intranode)::",
            ("deep_ep::intranode::dispatch", "uccl::internode_ll::combine", "hybrid_ep::dispatch_kernel"),
            ("deepseek-ai/DeepEP/csrc/kernels/legacy/intranode.cu", "uccl-project/uccl/ep/src/intranode.cu")),
    Library("MORI-EP", r"(?:^|::)(?:mori::moe::)?Ep(?:Dispatch|Combine)",
            ("mori::moe::EpDispatchIntraNodeKernel", "EpCombineInterNodeV1Kernel_bf16"),
            ("ROCm/mori/src/ops/dispatch_combine/intranode.hpp", "ROCm/mori/src/ops/kernels/ep_common.hip")),
    Library("pplx-garden, pplx-kernels", r"(?:^|::)(?:pplx::|a2a_(?:dispatch|combine))|^::(?:dispatch|combine)Kernel$",
            ("a2a_dispatch_send_kernel", "(anonymous namespace)::dispatchKernel"),
            ("perplexityai/pplx-garden/p2p-all-to-all/a2a-kernels/src/a2a/a2a_dispatch_send.cu",
             "ppl-ai/pplx-kernels/csrc/all_to_all/internode_dispatch.cu")),
    Library("PyTorch symmetric memory",
            r"(?:^|::)(?:symmetric_memory::|nvshmem_extension::|multimem_|one_shot_|two_shot_)",
            ("multimem_all_reduce_kernel", "c10d::symmetric_memory::barrier_kernel"),
            ("pytorch/pytorch/torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu",
             "pytorch/pytorch/torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu")),
    Library("all-reduce of vLLM, SGLang, AITER", r"(?:^|::)cross_device_reduce_[12]stage",
            ("vllm::cross_device_reduce_1stage", "sglang::cross_device_reduce_1stage",
             "aiter::cross_device_reduce_2stage"),
            ("vllm-project/vllm/csrc/custom_all_reduce.cuh",
             "sgl-project/sglang/sgl-kernel/csrc/allreduce/custom_all_reduce.cuh",
             "ROCm/aiter/csrc/include/custom_all_reduce.cuh")),
    Library("Transformer Engine", r"(?:^|::)k?userbuffers_",
            ("userbuffers_fp16_sum_inplace_gpu_rw", "kuserbuffers_pushsend"),
            ("NVIDIA/TransformerEngine/transformer_engine/common/comm_gemm_overlap/userbuffers/userbuffers.cu",)),
    Library("TensorRT-LLM", r"(?:^|::)(?:moeCommKernel|moe_comm::|moeA2A)",
            ("tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel",),
            ("NVIDIA/TensorRT-LLM/cpp/tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels.cu",)),
    Library("oneCCL",
            r"(?:^|::)(?:oneccl_|ccl::|(?:Allgatherv?|Allreduce|ReduceScatter)\w*[Kk]ernel|(?:NoCopy)?Kernel_(?:all_sum|"
            r"local_sum_and_distribute_to_remote_ranks|gather_from_remote_and_dist_to_rank_pair|2rank)$)",
            ("AllreduceLargeKernel_GlobalSync", "Kernel_local_sum_and_distribute_to_remote_ranks"),
            ("uxlfoundation/oneCCL/src/coll/algorithms/allreduce/sycl/allreduce_large_sycl.hpp",
             "uxlfoundation/oneCCL/src/coll/algorithms/allreduce/sycl/allreduce_medium_sycl.hpp")),
    Library("NIXL-EP, Mooncake", r"(?:^|::)(?:nixl_ep|mooncake)::",
            ("nixl_ep::ep_kernels::dispatch", "mooncake::combine", "mooncake::elastic::hybrid_dispatch_impl"),
            ("ai-dynamo/nixl/examples/device/ep/csrc/kernels/nixl_ep_ll.cu",
             "kvcache-ai/Mooncake/mooncake-ep/src/mooncake_ep_kernel.cu")),
    Library("Triton-distributed",
            r"^(?:tile_)?kernel_(?:\w+_)?(?:dispatch|combine|scatter)_token|^kernel_(?:skipped_token|all2all)_"
            r"|^kernel_get_(?:ag_splits|dispatch_send)_|^(?:dispatch|combine)_kernel_v2$|^kernel_(?:pre|post)_attn_\w*a2a"
            r"|^p2p_(?:put|copy)_|^barrier_all_(?:intra|kernel|ipc)|^_forward_(?:push|pull)_",
            ("kernel_dispatch_token", "combine_kernel_v2", "tile_kernel_gather_combine_token_intra_node"),
            ("ByteDance-Seed/Triton-distributed/python/triton_dist/kernels/nvidia/ep_a2a.py",
             "ByteDance-Seed/Triton-distributed/python/triton_dist/kernels/nvidia/low_latency_all_to_all_v2.py")),
    Library("moe-dualpipe", r"^(?:push|receive_rows|receive_sums|release|wait_for_ranks)_kernel$",
            ("push_kernel",), ("kernels/gpu",)),
    Library(
        "any collective in the function's own name",
        r"(?:(?<![A-Za-z])all|(?<!A)All|ALL)_?(?:[Rr]educe|[Gg]ather|[Tt]o_?[Aa]ll)(?!\w*::)"
        r"|(?:(?<![A-Za-z])reduce|Reduce)_?[Ss]catter(?!\w*::)|(?:(?<![A-Za-z])send|Send)_?[Rr]ecv(?!\w*::)",
        ("allreduce_fusion_kernel_oneshot_lamport", "moeAllToAllKernel"),
        ("flashinfer-ai/flashinfer/include/flashinfer/comm/trtllm_allreduce_fusion.cuh",
         "NVIDIA/TensorRT-LLM/cpp/tensorrt_llm/kernels/fusedMoeCommKernels.cu"),
    ),
)  # fmt: skip

_LIBRARIES = re.compile("|".join(library.pattern for library in LIBRARIES))
_COMPUTES = re.compile(r"^triton_(?:poi|red|per|tem|for|spl)_|(?i:gemm|matmul)")
"""Kernels that torch.compile generates are named after the operators that they fuse. They do not communicate."""
_COPIES = re.compile(r"^(?:__amd_rocclr_|memcpy\d+_post)")
"""Copies and fills that a driver runs as kernels."""
_PEER = re.compile(r"\bPtoP\b|PeerToPeer")
_ANNOTATION = re.compile(
    r"nccl|nvshmem|deep_?ep|all_?to_?all|all_?gather|all_?reduce|reduce_?scatter|send_?recv", re.IGNORECASE
)
"""Annotations that are transfers when a CPU is the device."""


@dataclass(frozen=True, slots=True)
class Names:
    """Rules for the names of device work: the table, and a user's own regular expressions before it.

    comm: names with this are communication. compute: names with this are computation, even if they match `comm`.
    Both are searched in the whole name. Raises ValueError for an invalid regular expression.
    """

    comm: str | None = None
    compute: str | None = None

    def __post_init__(self) -> None:
        for option, text in (("comm", self.comm), ("compute", self.compute)):
            try:
                re.compile(text or "")
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{option} {quoted(text)} is not a regular expression: {error}") from None

    def kind_of(self, event: DeviceEvent) -> Kind:
        """The kind of a device event. Only its name and category count, not its stream."""
        return _kind(event.name, event.category, self.comm, self.compute)

    def is_unknown(self, event: DeviceEvent) -> bool:
        """Whether an event counts as computation only because no rule knows its name."""
        return self.kind_of(event) == "compute" and _own_rule(event.name, self.comm, self.compute) is None

    def is_transfer(self, annotation: str) -> bool:
        """Whether an annotation is a transfer when a CPU is the device."""
        own = _own_rule(annotation, self.comm, self.compute)
        return own == "comm" or (own is None and _ANNOTATION.search(annotation) is not None)


NAMES = Names()
_RESULT = re.compile(r"^(?:void|[\w:]*::type) ")


def function_name(name: str) -> str:
    """The qualified name of a kernel's function, from a demangled or mangled name.

    "void (anonymous namespace)::f<g<int>, 2>(int*) [clone .kd]" -> "::f"; "_ZN7deep_ep6layoutEPi" -> "deep_ep::layout"
    """
    if name.startswith("_Z"):
        return _unmangled(name)
    name = name.replace("(anonymous namespace)", "").replace("<unnamed>", "")
    before = ""
    while name != before:
        name, before = re.sub(r"<[^<>]*>", "", name), name
    return _RESULT.sub("", re.split(r"[<(\[]", name, maxsplit=1)[0].strip())


def _unmangled(name: str) -> str:
    """The parts of a mangled name, each of which follows its length. SYCL names kernels after types: "_ZTS7MyClass"."""
    at = 4 if name.startswith("_ZTS") else 2
    parts, at = [], at + name.startswith("N", at)
    while length := re.match(r"\d+", name[at : at + 4]):
        at += length.end()
        parts.append(name[at : at + int(length[0])])
        at += int(length[0])
    return "::".join(parts) or name


@lru_cache(maxsize=1 << 16)
def _kind(name: str, category: str, comm: str | None, compute: str | None) -> Kind:
    if category in ("transfer", "operator"):
        return "comm" if category == "transfer" else "compute"
    if own := _own_rule(name, comm, compute):
        return own
    function = function_name(name)
    if category != "kernel" or _COPIES.search(function):
        return "comm" if category == PEER_COPY or _PEER.search(name) else "copy"
    return "comm" if _LIBRARIES.search(function) and not _COMPUTES.search(function) else "compute"


def _own_rule(name: str, comm: str | None, compute: str | None) -> Kind | None:
    if compute is not None and re.search(compute, name):
        return "compute"
    return "comm" if comm is not None and re.search(comm, name) else None


_COLLECTIVES = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
    "send_recv",  # NCCL's kernel for all of send, recv, all_to_all, gather and scatter
    "broadcast", "reduce", "gather", "scatter", "send", "recv",
)  # fmt: skip
"""A name is of the first kind that occurs in it."""
_COLLECTIVES_OF_FUNCTIONS = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
"""Kinds that the name of any function can tell. Others, such as "send", can be parts of something else."""
_NCCL_KERNEL = re.compile(r"nccl\w*?Kernel_([a-z]+)", re.IGNORECASE)
_BACKEND = re.compile(r"(?:nccl|gloo|ucc|mpi|xccl|rccl):(\w+)")


def kind_of_collective(event: DeviceEvent) -> str:
    """The kind of a transfer: from what the backend recorded, otherwise from the name. "" if unknown."""
    if event.collective is not None and event.collective.name:
        return _known_kind(event.collective.name)
    return _kind_of_name(event.name)


@lru_cache(maxsize=1 << 12)
def _kind_of_name(name: str) -> str:
    if found := _NCCL_KERNEL.search(name) or _BACKEND.match(name):
        return _known_kind(found[1])
    function = function_name(name).replace("cross_device_reduce", "all_reduce")  # of vLLM, SGLang and AITER
    kind = _known_kind(function)
    return kind if kind in _COLLECTIVES_OF_FUNCTIONS else ""


@lru_cache(maxsize=1 << 12)
def _known_kind(name: str) -> str:
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for kind in _COLLECTIVES if kind.replace("_", "") in letters), "")
