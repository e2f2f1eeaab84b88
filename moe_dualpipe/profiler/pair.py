"""The work that is measured: two chunks on one stage in the middle of a pipeline, interleaved or one after the other.

    train     the forward of one micro-batch, and the backward of another
    prefill   the forwards of two micro-batches of whole sequences
    decode    the forwards of two micro-batches of one new token for each sequence, behind a filled cache

The stage is blocks with experts only, as in DeepSeek's published profiles; neither embedding nor head.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..expert_parallel import ExpertParallel
from ..models import ModelConfig, MoE, StageSpec, TransformerStage, preset
from ..models.attention import KVCache
from ..models.router import BalancedRouter

Mode = Literal["train", "prefill", "decode"]
Routing = Literal["balanced", "real"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """What a micro-batch is, and what it goes through. `tokens` of it, in sequences of `seq`; in decode one new token
    of each of `tokens` sequences, whose first `seq` are cached. `layers` blocks of `model`, all with experts."""

    mode: Mode
    preset: str
    model: ModelConfig
    layers: int
    seq: int
    tokens: int
    routing: Routing
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def from_preset(
        cls, mode: Mode, name: str, layers: int = 4, seq: int = 0, tokens: int = 0, routing: Routing = "balanced",
        device: torch.device = CPU,
    ) -> "Workload":  # fmt: skip
        """The work of the model called `name`; 0 means a choice, as `profile run --help` says.

        Raises ValueError for what contradicts itself.
        """
        model = preset(name)
        if layers < 1:
            raise ValueError(f"--layers must be at least 1: got {layers}")
        for flag, number in (("seq", seq), ("tokens", tokens)):
            if number < 0:
                raise ValueError(f"--{flag} cannot be negative: got {number}")
        seq = seq or (4096 if device.type == "cuda" else 1024)
        tokens = tokens or (128 if mode == "decode" else 4096 if 4096 % seq == 0 else seq)
        if mode != "decode" and tokens % seq:
            raise ValueError(
                f"--tokens {tokens} are no whole sequences of --seq {seq}: use --tokens {-(-tokens // seq) * seq}"
            )
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return cls(mode, name, model, layers, seq, tokens, routing, device, dtype)

    @property
    def sequences(self) -> int:
        return self.tokens if self.mode == "decode" else self.tokens // self.seq

    @property
    def described(self) -> str:
        what = f"behind {self.seq:,} cached ones each" if self.mode == "decode" else f"in sequences of {self.seq:,}"
        dtype, layers = str(self.dtype).removeprefix("torch."), f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        return (
            f"{self.mode} on {self.device} in {dtype}: {layers} of {self.preset}, {self.tokens:,} tokens {what}, "
            f"{self.routing} routing"
        )


class Pair:
    """Both chunks, ready to run over `expert_parallel`: `prepare`, then `sequential` or `overlapped`, in turns."""

    def __init__(self, work: Workload, expert_parallel: ExpertParallel, seed: int = 0):
        self.work = work
        config = replace(work.model, num_layers=work.layers, num_dense_layers=0)
        spec = StageSpec(range(work.layers), embedding=False, head=False, share=1.0)
        self.stage = TransformerStage(config, spec, expert_parallel, seed)
        if work.routing == "balanced":
            for module in self.stage.modules():
                if isinstance(module, MoE):
                    router = BalancedRouter(config, module.kernels)
                    router.load_state_dict(module.router.state_dict())  # that were made from the seed
                    module.router = router
        self.stage.to(work.device, work.dtype)
        length = 1 if work.mode == "decode" else work.seq
        shape = work.sequences, length, config.hidden_size
        random = torch.Generator().manual_seed(seed)
        self.x, self.y, self.dx = (torch.randn(shape, generator=random).to(work.device, work.dtype) for _ in range(3))
        self._chunks: tuple[Any, Any] = (), ()

    def prepare(self) -> None:
        """What comes before, and is not measured: a forward that will go backward, or filled caches."""
        work, stage = self.work, self.stage
        if work.mode == "train":
            stage.zero_grad()
            x = self.x.clone().requires_grad_()
            self._chunks = ([stage(x)], [self.dx]), [self.y.clone().requires_grad_()]
        elif work.mode == "decode":
            caches = (
                KVCache.filled(stage.config, range(work.layers), work.sequences, work.seq, work.device, work.dtype)
                for _ in range(2)
            )
            self._chunks = tuple([x, cache] for x, cache in zip((self.x, self.y), caches, strict=True))  # type: ignore[assignment]
        else:
            self._chunks = [self.x], [self.y]

    def sequential(self) -> Tensor:
        """One chunk, then the other. Returns the last chunk's output."""
        first, second = self._chunks
        if self.work.mode == "train":
            y = self.stage(*second)
            torch.autograd.backward(*first)
            return y
        with torch.no_grad():
            self.stage(*first)
            return self.stage(*second)

    def overlapped(self) -> Tensor:
        """Both, each hiding the other's communication. Returns the same output."""
        first, second = self._chunks
        stage = self.stage
        if self.work.mode == "train":
            return stage.overlapped_forward_backward(stage, second, None, None, stage, None, *first)[0]
        with torch.no_grad():
            return stage.interleaved_forward(stage, first, stage, second)[1]
