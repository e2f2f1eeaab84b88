"""Scaled dot-product attention with torch's fastest kernel for the GPU.

By default, torch prefers FlashAttention-2. On Hopper and Blackwell, cuDNN's kernel is about twice as fast in training.
It also supports latent attention, whose keys (width 192) are wider than its values (width 128). FlashAttention-2 does
not, so torch would fall back to a slow kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .context_parallel import Context

CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
"""Kernels, in the order of preference. A kernel that does not support the inputs is skipped."""


def preferred_kernels(capability: tuple[int, int]) -> list[SDPBackend] | None:
    """The order of kernels for a GPU's compute capability; None: torch's own order.

    cuDNN comes first on capabilities 9.x and 10.x (Hopper, and Blackwell for data centers).
    """
    return CUDNN_FIRST if capability[0] in (9, 10) else None


def attend_slices(
    attend: Callable[..., Tensor], context: Context, q_BHSC: Tensor, k_BGLC: Tensor, v_BGLV: Tensor,
    mask: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Causal attention of a rank's two slices of queries to the keys and values of all L positions: [B, H, S, V].

    attend: a `ScaledDotProduct`. mask: [B, 1, S, L], in place of the causal one.
    """
    if mask is not None:
        return attend(q_BHSC, k_BGLC, v_BGLV, mask, **options)
    length, results = q_BHSC.shape[-2] // 2, []
    for number, q in zip(context.slices, q_BHSC.chunk(2, dim=-2), strict=True):
        end = (number + 1) * length
        k, v = k_BGLC[..., :end, :], v_BGLV[..., :end, :]
        if q.is_cuda:
            bias = causal_lower_right(length, end)
            results.append(F.scaled_dot_product_attention(q, k, v, bias, **options))  # pyright: ignore
        else:  # with queries in reverse, a mask with the same entries along each diagonal is a view of end + length
            entries = q.new_zeros(end + length - 1)
            entries[end:] = -torch.inf
            bias = entries.as_strided((1, 1, length, end), (0, 0, 1, 1))
            results.append(attend(q.flip(-2), k, v, bias, **options).flip(-2))
    return torch.cat(results, dim=-2)


class ScaledDotProduct(nn.Module):
    """`scaled_dot_product_attention` with `preferred_kernels`.

    ran: the kernels used so far, such as "cudnn_attention": one per combination of widths, dtype and kind of mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()
        self._asked: set[Any] = set()

    def forward(
        self, q_BHSC: Tensor, k_BGLC: Tensor, v_BGLV: Tensor, mask: Tensor | None = None, *, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        order = preferred_kernels(torch.cuda.get_device_capability(q_BHSC.device)) if q_BHSC.is_cuda else None
        if order is None:
            return self._attend(q_BHSC, k_BGLC, v_BGLV, mask, is_causal, scale, enable_gqa)
        with sdpa_kernel(order, set_priority=True):
            return self._attend(q_BHSC, k_BGLC, v_BGLV, mask, is_causal, scale, enable_gqa)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        if (key := (q.shape[-1], v.shape[-1], q.dtype, q.requires_grad, mask is None)) not in self._asked:
            self._asked.add(key)
            choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
            self.ran.add(SDPBackend(choice).name.lower())
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def attention_kernels(model: nn.Module) -> list[str]:
    """The kernels that the attention layers of a model have used, sorted by name."""
    return sorted({name for module in model.modules() if isinstance(module, ScaledDotProduct) for name in module.ran})
