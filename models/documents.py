"""Attention kept inside documents: which positions of a packed window belong together.

A training window is cut out of a stream of documents, each ended by a separator. Without a mask a position attends to
whatever stood before it in the window, other documents included. Where documents begin is known from the tokens alone,
which only the first stage sees, so the number of each position's document goes along with its hidden state from stage
to stage: four bytes beside the width of the model. The mask, S^2 of it, is made on every stage.

Rotary positions are relative: a document that starts in the middle of a window looks as if it started the window.

B sequences, S positions.
"""

import torch
from torch import Tensor


def documents(tokens_BS: Tensor, separator: int) -> Tensor:
    """How many documents have ended before each position, [B, S] int32; a separator belongs to what it ends.

    Example: separator=0, [5, 0, 7, 0, 0, 8] -> [0, 0, 1, 1, 2, 3].
    """
    ends_BS = tokens_BS == separator
    return ends_BS.cumsum(1, dtype=torch.int32) - ends_BS.int()


def document_mask(documents_BS: Tensor) -> Tensor:
    """Whether a position attends to another: one of its own document, and not behind it. [B, 1, S, S] bool."""
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same_BSS.tril()[:, None]
