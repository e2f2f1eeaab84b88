"""The kind of a collective, and the name of its group."""

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
_OF_FUNCTIONS = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
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
    return kind if kind in _OF_FUNCTIONS else ""


@lru_cache(maxsize=1 << 12)
def _known_kind(name: str) -> str:
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for kind in _KINDS if kind.replace("_", "") in letters), "")


def group_name(collective: Collective) -> str:
    """The description of the group; without one, its name in PyTorch, which can be a number."""
    return collective.group if collective.description in ("", "undefined") else collective.description
