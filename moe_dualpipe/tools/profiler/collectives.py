"""The kind of a collective, and how many bytes it moves: those that nccl-tests counts.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: bytes of the input, but for an all-gather and a
gather those of the output.
"""

import re
from functools import lru_cache

from .communication import function_name
from .trace import Collective, DeviceEvent

_KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
    "send_recv",  # NCCL's kernel for all of send, recv, all_to_all, gather and scatter
    "broadcast", "reduce", "gather", "scatter", "send", "recv",
)  # fmt: skip
"""A name is of the first kind that occurs in it."""
_COUNT_OUTPUT = "all_gather", "gather"
_OF_FUNCTIONS = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
"""Kinds that the name of any function can tell. Others, such as "send", can be parts of something else."""
_NCCL_KERNEL = re.compile(r"nccl\w*?Kernel_([a-z]+)", re.IGNORECASE)
_BACKEND = re.compile(r"(?:nccl|gloo|ucc|mpi|xccl|rccl):(\w+)")

DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1,
    "short": 2, "half": 2, "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
    "int": 4, "float": 4, "int32": 4, "uint32": 4, "float32": 4, "complexhalf": 4,
    "long": 8, "double": 8, "int64": 8, "uint64": 8, "float64": 8, "complexfloat": 8,
    "complexdouble": 16, "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of an element. Keys are names of c10::ScalarType (in lower case) and of torch's dtypes."""


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
    return kind if kind in _OF_FUNCTIONS else ""


@lru_cache(maxsize=1 << 12)
def _known_kind(name: str) -> str:
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for kind in _KINDS if kind.replace("_", "") in letters), "")


def bytes_of(event: DeviceEvent) -> int | None:
    """The bytes of a transfer on the side that counts for its kind; None if unknown."""
    found = event.collective
    if found is None:
        return event.bytes or None
    kind, size = kind_of_collective(event), element_bytes(found.dtype)
    if not kind or size is None:
        return event.bytes or None
    elements = found.out_elems if kind in _COUNT_OUTPUT else found.in_elems
    if kind == "recv" and not elements:
        elements = found.out_elems
    return None if elements is None else elements * size


def element_bytes(dtype: str) -> int | None:
    """The bytes of one element: 2 for "BFloat16" and "torch.bfloat16". None if the type is unknown."""
    return DTYPE_BYTES.get(dtype.lower().removeprefix("torch."))


def group_name(collective: Collective) -> str:
    """The description of the group; without one, its name in PyTorch, which can be a number."""
    return collective.group if collective.description in ("", "undefined") else collective.description


def group_size(collective: Collective | None) -> int | None:
    if collective is None:
        return None
    return collective.size or len(collective.ranks) or None
