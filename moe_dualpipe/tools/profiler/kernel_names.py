"""Short names of kernels, for labels: the function's own name, without return type, namespaces and arguments.

void at::native::elementwise_kernel<128, 4, ...>(int, ...)             elementwise_kernel
void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_f16_256x128>(...)  cutlass_80_tensorop_s16816gemm_f16_256x128
_ZN2at6native13reduce_kernelILi512E...                                  reduce_kernel
autograd::engine::evaluate_function: AddmmBackward0                     AddmmBackward0
ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)      ncclDevKernel_AllReduce_Sum_bf16_RING_LL
"""

import re
from functools import lru_cache

from ...messages import printable

ELLIPSIS = "…"
_WRAPPERS = re.compile(r"(?i)(device_|global_?)?kernel\d?|enable_sm\w+|_?Kernel|launch_kernel|invoke\w*|entry")
"""Functions that say nothing: what they run is their first template argument."""
_AUTOGRAD = "autograd::engine::evaluate_function: "
_MANGLED = re.compile(r"_ZN?K?(?=\d)|_ZN?K?L(?=\d)")
_ANONYMOUS = re.compile(r"\(anonymous namespace\)|<unnamed>|\{lambda[^}]*\}(?:::operator\(\))?|_GLOBAL__N_\w*")
_LONGEST = 4000  # longer names are cut: they need not be parsed


@lru_cache(maxsize=1 << 16)
def short_name(name: str) -> str:
    """Return a short name of a kernel or an operator; its beginning if it has no known form."""
    text = name[:_LONGEST].strip().removeprefix(_AUTOGRAD).removesuffix(".kd")
    if found := _MANGLED.match(text):
        text = _demangled(text[found.end() :]) or text
    elif "(" in text or "<" in text or text.startswith("void "):
        text = _function(text)
    return printable(text or name, 200)


def shortened(text: str, letters: int) -> str:
    """Return `text` with at most `letters` characters, the last one "…" if it was cut; "" if under three are left."""
    if len(text) <= letters:
        return text
    return text[: letters - 1] + ELLIPSIS if letters >= 3 else ""


def _function(text: str) -> str:
    """The name of a demangled function: what stands before its template arguments and parameters."""
    text = _ANONYMOUS.sub("_", text)
    head, inside = _split(text)
    if "::" not in head and not head.startswith("void "):
        return head
    *spaces, own = head.split(" ")[-1].split("::")
    if not inside or not _WRAPPERS.fullmatch(own):
        return own
    argument = _function(_first_argument(inside))
    if len(argument) > 8:
        return argument
    return f"{spaces[-1]}::{own}" if spaces else own


def _split(text: str) -> tuple[str, str]:
    """Return what stands before the last component's brackets, and the inside of its angle brackets."""
    depth, head, inside, opened = 0, [], "", 0
    for at, letter in enumerate(text):
        if letter == "<":
            if not depth:
                opened, inside = at + 1, ""
            depth += 1
        elif letter == ">" and depth:
            depth -= 1
            if not depth:
                inside = text[opened:at]
        elif depth:
            continue
        elif letter == "(":
            break
        else:
            if letter == ":":  # a template before "::" is a namespace's or a class's
                inside = ""
            head.append(letter)
    if depth:  # the name was cut off
        inside = text[opened:]
    return "".join(head).strip(), inside


def _first_argument(text: str) -> str:
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            return text[:at].strip()
    return text.strip()


def _demangled(text: str) -> str:
    """The last of the names, each after its length, in the text of a mangled name."""
    name, at = "", 0
    while found := re.compile(r"L?(\d{1,4})").match(text, at):
        begin = found.end()
        end = begin + int(found[1])
        if end > len(text):
            break
        name, at = text[begin:end], end
    return name
