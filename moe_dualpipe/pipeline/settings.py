"""Parallel: how a model is divided over ranks. Numerics: device, dtype and kernels of a rank. `Pipeline` takes both."""

from dataclasses import dataclass
from typing import Literal

import torch

from ..expert_parallel import EpBackend
from ..kernels.products import Library
from ..models import StageOptions
from ..models.config import DEFAULT_OPTIONS


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the ranks share a model, beside its schedule."""

    ep: int = 1
    """Number of ranks that share the experts of a layer."""
    ep_backend: EpBackend = "auto"
    """Backend for the exchange of tokens (docs/expert_parallel.md)."""
    expert_sums: Literal["rank", "choice"] = "rank"
    """Order in which the outputs of a token's experts are added: by rank, or by the router's choices."""
    layers: tuple[int, ...] = ()
    """The number of layers of each stage; empty: about the same FLOPs in each."""
    overlap: bool = True
    """Run the communication of one micro-batch during the computation of another, where the schedule pairs them."""
    wgrad: Literal["early", "late"] = "early"
    """late: overlapped pairs compute mlp(W) after mlp(F) (overlap/engine.py)."""
    max_deferred: int | None = None
    """Maximum number of chunks with deferred weight gradients. None: no limit."""
    timeout: float | None = None
    """Seconds that a collective operation waits. None: torch's default."""
    cp: int = 1
    """Number of ranks that share each sequence (models/context_parallel.py)."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a rank computes."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    """Of weights and activations."""
    options: StageOptions = DEFAULT_OPTIONS
    """How the stages are initialized and computed."""
    whole: Literal["", "cuda_graph", "compiled"] = ""
    """How to run a micro-batch of a training step. "": by the schedule. cuda_graph: as one CUDA graph. compiled: as one
    function of torch.compile, on a CPU. The last two bypass the schedule; training/rules.py lists their limits."""
    products: Library = "mkl"
    """The library for products of fp32 matrices on a CPU."""
    fp8_dispatch: bool = False
    """Also dispatch tokens in FP8. Needs an FP8 recipe in `options`."""


NOT_PARALLEL, ON_CPU = Parallel(), Numerics()
"""The defaults: no expert parallelism, and fp32 on a CPU."""
