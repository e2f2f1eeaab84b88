"""Tell communication from computation and copies by the names of device work.

A trace does not say which kernels communicate. Their names do, if one knows the libraries: LIBRARIES is the table of
all that are known. A pattern is searched in the name of the function alone, without its return type, template arguments
and parameters, because these can name anything: `at::native::elementwise_kernel<..., my::all_reduce_functor>` is
computation. A kernel that multiplies matrices and communicates at once is computation, too.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ..messages import quoted
from .trace import DeviceEvent

Kind = Literal["compute", "comm", "copy"]


class Library(NamedTuple):
    """Kernels of one library, or of several with the same names."""

    name: str
    pattern: str
    """Searched in the name of the kernel's function. Case counts."""
    examples: tuple[str, ...]
    source: str
    """Where these names are defined or shown."""


LIBRARIES = (
    Library("NCCL, RCCL, MSCCL", r"(?:^|::)(?:nccl|rccl|msccl)",
            ("ncclDevKernel_AllGather_RING_LL", "mscclKernel_Sum_half_Simple"), "https://github.com/NVIDIA/nccl"),
    Library("NVSHMEM, rocSHMEM", r"(?:^|::)(?:nvshmem|roc_?shmem)",
            ("nvshmemi_transfer",), "https://github.com/NVIDIA/nvshmem"),
    Library("DeepEP, UCCL", r"(?:^|::)(?:deep_ep|ep|hybrid_ep|uccl|internode|internode_ll|intranode)::",
            ("deep_ep::intranode::dispatch", "uccl::internode_ll::combine", "hybrid_ep::dispatch_kernel"),
            "https://github.com/deepseek-ai/DeepEP"),
    Library("MORI-EP", r"(?:^|::)(?:mori::moe::)?Ep(?:Dispatch|Combine)",
            ("mori::moe::EpDispatchIntraNodeKernel",), "https://github.com/ROCm/mori"),
    Library("pplx-kernels", r"(?:^|::)(?:pplx::|a2a_(?:dispatch|combine))",
            ("a2a_dispatch_send_kernel",), "https://github.com/perplexityai/pplx-garden"),
    Library("PyTorch symmetric memory",
            r"(?:^|::)(?:symmetric_memory::|nvshmem_extension::|multimem_|one_shot_|two_shot_)",
            ("multimem_all_reduce_kernel", "c10d::symmetric_memory::barrier_kernel"),
            "https://github.com/pytorch/pytorch"),
    Library("all-reduce of vLLM, SGLang, AITER", r"(?:^|::)cross_device_reduce_[12]stage",
            ("vllm::cross_device_reduce_1stage", "aiter::cross_device_reduce_2stage"),
            "https://github.com/vllm-project/vllm"),
    Library("Transformer Engine", r"(?:^|::)k?userbuffers_",
            ("userbuffers_fp16_sum_inplace_gpu_rw", "kuserbuffers_pushsend"),
            "https://github.com/NVIDIA/TransformerEngine"),
    Library("TensorRT-LLM", r"(?:^|::)(?:moeCommKernel|moe_comm::|moeA2A)",
            ("tensorrt_llm::kernels::moeCommKernel",), "https://github.com/NVIDIA/TensorRT-LLM"),
    Library("oneCCL", r"(?:^|::)(?:oneccl|ccl::)", ("oneccl_allreduce_pcie",), "https://github.com/uxlfoundation/oneCCL"),
    Library("moe-dualpipe", r"^(?:push|receive_rows|receive_sums|release)_kernel$",
            ("push_kernel",), "kernels/gpu"),
    Library(
        "any collective in the function's own name",
        r"(?:(?<![A-Za-z])all|(?<!A)All|ALL)_?(?:[Rr]educe|[Gg]ather|[Tt]o_?[Aa]ll)(?!\w*::)"
        r"|(?:(?<![A-Za-z])reduce|Reduce)_?[Ss]catter(?!\w*::)|(?:(?<![A-Za-z])send|Send)_?[Rr]ecv(?!\w*::)",
        ("two_shot_all_reduce_kernel", "allreduce_fusion_kernel_oneshot_lamport", "moeAllToAllKernel"), "",
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

    def is_transfer(self, annotation: str) -> bool:
        """Whether an annotation is a transfer when a CPU is the device."""
        own = _own_rule(annotation, self.comm, self.compute)
        return own == "comm" or (own is None and _ANNOTATION.search(annotation) is not None)


NAMES = Names()
_RESULT = re.compile(r"^(?:void|[\w:]*::type) ")


def function_name(name: str) -> str:
    """The qualified name of a kernel's function, from a demangled or mangled name.

    "void (anonymous namespace)::f<g<int>, 2>(int*) [clone .kd]" -> "::f"; "_ZN7deep_ep5layoutEPi" -> "deep_ep::layout"
    """
    if name.startswith("_Z"):
        return _unmangled(name)
    name = name.replace("(anonymous namespace)", "").replace("<unnamed>", "")
    before = ""
    while name != before:
        name, before = re.sub(r"<[^<>]*>", "", name), name
    return _RESULT.sub("", re.split(r"[<(\[]", name, maxsplit=1)[0].strip())


def _unmangled(name: str) -> str:
    """The parts of a mangled name, each of which follows its length."""
    parts, at = [], 3 if name.startswith("_ZN") else 2
    while length := re.match(r"\d+", name[at : at + 4]):
        at += length.end()
        parts.append(name[at : at + int(length[0])])
        at += int(length[0])
    return "::".join(parts) or name


@lru_cache(maxsize=1 << 16)
def _kind(name: str, category: str, comm: str | None, compute: str | None) -> Kind:
    if category == "transfer":
        return "comm"
    if category == "operator":
        return "compute"
    return _own_rule(name, comm, compute) or _kind_by_table(name, category)


def _own_rule(name: str, comm: str | None, compute: str | None) -> Kind | None:
    if compute is not None and re.search(compute, name):
        return "compute"
    return "comm" if comm is not None and re.search(comm, name) else None


def _kind_by_table(name: str, category: str) -> Kind:
    if category != "kernel":
        return "comm" if _PEER.search(name) else "copy"
    function = function_name(name)
    if _COPIES.search(function):
        return "comm" if _PEER.search(name) else "copy"
    return "comm" if _LIBRARIES.search(function) and not _COMPUTES.search(function) else "compute"
