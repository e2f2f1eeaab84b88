"""Dispatch in 8 bits: rows travel as e4m3 with their scales, and are read back on arrival. Results return unrounded.

This wrapper of any backend but DeepEP rounds what dispatch sends: the tokens in forward, and the gradients of the
experts' outputs in backward. A row of D bf16 numbers becomes a message of D bytes, and one for each scale, which is a
power of two (UE8M0); messages are filled up to multiples of 16 bytes. Rounding a row that was read back changes nothing
(fp8.py), so experts in FP8 compute the same from it as from the row before dispatch.

T tokens, D model dim, K experts per token, N received rows, B blocks of a row.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.fp8 import DTYPE, Fp8Matrix, Fp8Recipe
from .divided import WrappedBackend
from .exchange import ALIGNMENT, AsyncResult
from .protocol import ExpertParallel, Pending, Received, Route

CARRIER = torch.float16
"""The dtype of messages. Nothing computes with them, but the kernels of Symmetric cannot move uint8."""


class Fp8Dispatch(WrappedBackend):
    """The expert parallelism of `backend`, with dispatched rows rounded as `recipe` says.

    Raises ValueError for a recipe whose scales are not powers of two.
    """

    def __init__(self, backend: ExpertParallel, recipe: Fp8Recipe):
        if not recipe.power_of_two:
            raise ValueError("dispatch in FP8 needs scales that are powers of two: use the recipe ue8m0 or mxfp8")
        super().__init__(backend)
        self.recipe = recipe

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        message = pack(self.recipe.quantize_rows(x_TD))
        pending = self.backend.dispatch(message, route, weights_TK)

        def finish() -> Received:
            received, weights_NK = pending.wait()
            return Received(unpack(received, x_TD.shape[1], self.recipe.block).read(x_TD.dtype), weights_NK)

        return AsyncResult([pending], finish)


def pack(rows: Fp8Matrix) -> Tensor:
    """The message of each row, in CARRIER: its numbers, then the exponents of its scales."""
    message = torch.cat([rows.stored.view(torch.uint8), rows.exponents], 1)
    return functional.pad(message, (0, -message.shape[1] % ALIGNMENT)).view(CARRIER)


def unpack(message: Tensor, D: int, block: int) -> Fp8Matrix:
    """The rows of `D` numbers, with a scale for each `block`, in a message of `pack`."""
    rows = message.view(torch.uint8)
    exponents_NB = rows[:, D : D + -(-D // block)].to(torch.int32)
    return Fp8Matrix(rows[:, :D].view(DTYPE), (exponents_NB << 23).view(torch.float32), 1, block)
