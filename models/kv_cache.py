"""The key/value cache: what attention stores of past positions during generation.

B sequences, S new positions, L all positions, N allocated positions, G heads, C width.
"""

import torch
from torch import Tensor


class KVCache:
    """Rotated keys and values of all past positions of one micro-batch, for the layers of one stage.

    `length` is the number of past positions. The stage increases it after a forward, so that all layers of a forward
    see the same past. Reduce it to drop the latest positions, or set it to 0 to start other sequences.

    New positions are written in place. Memory grows by `STEP` positions, so when decoding, only one forward in `STEP`
    copies the past. One new position needs no mask. Several new positions after a past need a mask [S, L], which the
    fastest kernels do not support.
    """

    STEP = 256

    def __init__(self):
        self.length = 0
        self._layers: dict[int, Tensor] = {}  # [tensors, B, G, N, C]: two for keys and values, one for latents

    def append(self, layer: int, *new_BGSC: Tensor) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values after the first `length` positions. Returns all of each, [B, G, L, C].

        Raises ValueError if gradients are enabled, or if the layer or the shape differs from the past.
        """
        if torch.is_grad_enabled():
            raise ValueError("a key/value cache has no gradients: call the stage under torch.no_grad()")
        batch, heads, new, width = new_BGSC[0].shape
        past, end = self.length, self.length + new
        kv = self._layers.get(layer) if past else new_BGSC[0].new_empty(len(new_BGSC), batch, heads, 0, width)
        if kv is None:
            raise ValueError(f"the cache has {past} positions of layers {[*self._layers]}: got layer {layer}")
        if (stored := [*kv.shape[1:3], kv.shape[4]]) != (got := [batch, heads, width]):
            raise ValueError(f"the cache has {past} positions of {stored} (sequences, heads, width): got {got}")
        if kv.shape[3] < end:
            old, capacity = kv, (end // self.STEP + 1) * self.STEP
            kv = self._layers[layer] = old.new_empty(len(old), batch, heads, capacity, width)
            kv[:, :, :, :past] = old[:, :, :, :past]
        for stored_BGNC, tensor_BGSC in zip(kv, new_BGSC, strict=True):
            stored_BGNC[:, :, past:end] = tensor_BGSC
        return kv[:, :, :, :end].unbind()
