"""Stand-ins for deep_ep's two buffers, on CPU tensors and gloo, after DeepEP 2.1.0 (commit dd758caf).

They have the signatures in signatures.json and check what the Python classes and the C++ below them assert: dtypes,
shapes, contiguity, and which arguments may be combined. Transfers are real, so results can be compared. What the real
library writes on its own stream is NaN or -9 until the event has been waited for.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from moe_dualpipe.expert_parallel.deepep import backend
from moe_dualpipe.expert_parallel.deepep.library import Machine

from .buffer import Buffer
from .common import EventOverlap
from .elastic import ElasticBuffer

__all__ = ["Buffer", "ElasticBuffer", "EventOverlap", "installed"]


@contextlib.contextmanager
def installed(*classes: type, capability: tuple[int, int] = (9, 0)) -> Iterator[Any]:
    """deep_ep can be imported and has these classes; the machine has a GPU, and its tensors are CPU tensors."""
    library = types.ModuleType("deep_ep")
    vars(library).update({c.__name__: c for c in classes}, topk_idx_t=torch.int64, __version__="2.1.0")
    machine = mock.patch.object(backend, "inspect_machine", lambda _group: Machine("cpu", capability))
    with mock.patch.dict(sys.modules, deep_ep=library), machine, mock.patch.object(Buffer, "num_sms", 20):
        yield library
