"""Check that all ranks read the same text.

Every rank reads the text itself and draws the same batches: the first stage takes the inputs, the last stage the
labels. If a machine has another version of a file, the labels do not match the inputs.
"""

import torch
import torch.distributed as dist

from ..data import TextData
from ..messages import plural


def check_same_text(text: TextData, device: torch.device) -> None:
    """Raise ValueError, on all ranks, unless all ranks have the same `text`. Collective."""
    fingerprint = torch.tensor(text.fingerprint(), device=device)
    gathered = [torch.empty_like(fingerprint) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, fingerprint)
    fingerprints = torch.stack(gathered).tolist()
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    if others:
        ranks = ", ".join(map(str, others[:8])) + ", …" * (len(others) > 8)
        raise ValueError(
            f"--data is not the same on all ranks: {plural(len(others), 'rank')} ({ranks}) read other text than "
            "rank 0; give every machine the same files"
        )
