"""Expand weights in fp8 as DeepSeek-V3 publishes them: each block of 128 x 128 numbers has a scale in fp32.

Source: the model card and `weight_dequant` of DeepSeek-V3. Despite the name of the scales,
`weight_scale_inv`, a weight is the product of its number and its scale.
"""

import torch
from torch import Tensor

BLOCK = 128


def dequantize(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return quantized * scale in `dtype`; products are computed in fp32 and rounded once.

    quantized: [..., rows, columns] in fp8. scales: [..., rows / 128, columns / 128], rounded up, in fp32.

    Example: the number in row 130 and column 5 is multiplied by scales[1, 0].
    """
    weight = torch.empty(quantized.shape, dtype=dtype)
    rows, columns = quantized.shape[-2:]
    for first in range(0, rows, BLOCK):  # a scale per number of the whole matrix would need much memory
        stripe = quantized[..., first : first + BLOCK, :].float()
        of_columns = scales[..., first // BLOCK, :].repeat_interleave(BLOCK, dim=-1)[..., :columns]
        weight[..., first : first + BLOCK, :] = stripe * of_columns[..., None, :]
    return weight
