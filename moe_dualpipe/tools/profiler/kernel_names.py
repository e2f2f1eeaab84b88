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
from .communication import function_name

_WRAPPERS = re.compile(r"(?i)(device_|global_?)?kernel\d?|enable_sm\w+|_?Kernel|launch_kernel|invoke\w*|entry")
"""Functions that say nothing: what they run is their first template argument."""
_AUTOGRAD = "autograd::engine::evaluate_function: "
_LONGEST = 4000  # longer names are cut: they need not be parsed


@lru_cache(maxsize=1 << 16)
def short_name(name: str) -> str:
    """Return a short name of a kernel or an operator; its beginning if it has no known form."""
    text = name[:_LONGEST].strip().removeprefix(_AUTOGRAD).removesuffix(".kd")
    if text.startswith(("_Z", "void ")) or "(" in text or "<" in text:
        *spaces, own = function_name(text).split("::")
        _, _, arguments = text.partition("<")
        inside = re.split(r"[,>]", short_name(arguments))[0].strip() if arguments and _WRAPPERS.fullmatch(own) else ""
        text = inside if len(inside) > 8 else "::".join([*spaces[-1:], own]) if _WRAPPERS.fullmatch(own) else own
    return printable(text or name, 200)


def shortened(text: str, letters: int) -> str:
    """Return `text` with at most `letters` characters, the last one "…" if it was cut; "" if under three are left."""
    if len(text) <= letters:
        return text
    return text[: letters - 1] + "…" if letters >= 3 else ""
