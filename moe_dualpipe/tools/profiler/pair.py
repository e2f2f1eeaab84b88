"""The measured workload: two chunks on a stage in the middle of a pipeline, run in sequence or overlapped.

    train     the forward of one micro-batch and the backward of another
    prefill   the forwards of two micro-batches of whole sequences
    decode    the forwards of two micro-batches of one new token per sequence, with a filled KV cache

Like DeepSeek's published profiles, the stage has MoE layers only, without embedding and head.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ...expert_parallel import Fp8Dispatch, Loopback
from ...kernels.fp8 import Fp8Recipe
from ...kernels.options import Fp8
from ...messages import LARGEST, check_range, plural
from ...models import ModelConfig, StageOptions, StageSpec, TransformerStage, filled_cache, preset
from ...models.context_parallel import LoopbackContext, check_context
from ...runtime.groups import product_sms

Mode = Literal["train", "prefill", "decode"]
Routing = Literal["balanced", "real"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PairWorkload:
    """The sizes of the micro-batches and of the stage.

    tokens: tokens per micro-batch. seq: tokens per sequence. In decode, a micro-batch has one new token for each of
    `tokens` sequences, and each sequence has `seq` cached tokens. layers: number of MoE layers of `model` in the stage.
    num_sms: as in `StageOptions`; `from_preset` sets what training uses. cp: ranks that share each sequence.
    """

    mode: Mode
    preset: str
    model: ModelConfig
    layers: int
    seq: int
    tokens: int
    routing: Routing
    device: torch.device
    dtype: torch.dtype
    fp8: Fp8 = "off"
    num_sms: int | None = None
    cp: int = 1

    @classmethod
    def from_preset(
        cls, mode: Mode, name: str, layers: int = 4, seq: int | None = None, tokens: int | None = None,
        routing: Routing = "balanced", device: torch.device = CPU,
        fp8: Fp8 = "off", cp: int = 1,
    ) -> "PairWorkload":  # fmt: skip
        """A workload on the preset `name`. A size that is None gets the default of `profile run`.

        Raises ValueError for an unknown preset and for invalid or conflicting sizes.
        """
        model = preset(name)
        seq = (4096 if device.type == "cuda" else 1024) if seq is None else seq
        check_range("--num-layers", layers, 1, 10_000)
        for flag, number in (("seq-len", seq), ("tokens", 1 if tokens is None else tokens)):
            check_range(f"--{flag}", number, 1, LARGEST)
        if tokens is None:
            tokens = 128 if mode == "decode" else 4096 if 4096 % seq == 0 else seq
        if mode != "decode" and tokens % seq:
            raise ValueError(f"--tokens {tokens} must be a multiple of --seq-len {seq}: use {-(-tokens // seq) * seq}")
        if cp > 1 and (mode == "decode" or device.type != "cpu"):
            where = f"on GPUs, use train.py --profile 4 --cp {cp}"
            raise ValueError(f"--cp {cp} needs --mode train or prefill on a CPU: use --device cpu; {where}")
        check_context(cp, seq)
        if fp8 != "off" and (fault := Fp8Recipe().kernels_fault(device)):
            raise ValueError(f"--fp8 {fp8} {fault.partition(':')[0]}: use --fp8 off")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return cls(mode, name, model, layers, seq, tokens, routing, device, dtype, fp8, product_sms(device), cp)

    @property
    def num_sequences(self) -> int:
        return self.tokens if self.mode == "decode" else self.tokens // self.seq

    @property
    def description(self) -> str:
        tokens = f"with {self.seq:,} cached tokens each" if self.mode == "decode" else f"in sequences of {self.seq:,}"
        dtype, layers = str(self.dtype).removeprefix("torch."), plural(self.layers, "layer")
        tokens += f" over {self.cp} context ranks" if self.cp > 1 else ""
        fp8 = f", {self.fp8.replace('+', ' and ')} in FP8" if self.fp8 != "off" else ""
        return (
            f"{self.mode} on {self.device} in {dtype}: {layers} of {self.preset}, {self.tokens:,} tokens {tokens}, "
            f"{self.routing} routing{fp8}" + (f", products on {self.num_sms} SMs" if self.num_sms else "")
        )


class Pair:
    """Two chunks over a modeled link. Call `prepare` before each `sequential` or `overlapped`."""

    def __init__(self, workload: PairWorkload, link: Loopback, seed: int = 0):
        self.workload, expert_parallel = workload, link
        router = "balanced" if workload.routing == "balanced" else workload.model.router
        config = replace(workload.model, num_layers=workload.layers, num_dense_layers=0, dense_layers=(), router=router)
        spec = StageSpec(range(workload.layers), embedding=False, head=False, share=1.0)
        recipe = Fp8Recipe() if workload.fp8 != "off" else None
        if recipe and workload.fp8 == "experts+dispatch":
            expert_parallel = Fp8Dispatch(expert_parallel, recipe)
        context = LoopbackContext(workload.cp, link) if workload.cp > 1 else None
        options = StageOptions(seed, fp8=recipe, num_sms=workload.num_sms, context=context)
        self.stage = TransformerStage(config, spec, expert_parallel, options).to(workload.device, workload.dtype)
        shape = (
            workload.num_sequences,
            1 if workload.mode == "decode" else workload.seq // workload.cp,
            config.hidden_size,
        )
        random = torch.Generator().manual_seed(seed)
        self.x, self.y, self.dx = (
            torch.randn(shape, generator=random).to(workload.device, workload.dtype) for _ in range(3)
        )
        self._chunks: tuple[Any, Any] = (), ()

    def prepare(self) -> None:
        """Create the inputs of one run. Not measured: the forward for the backward (train), filled caches (decode)."""
        workload, stage = self.workload, self.stage
        if workload.mode == "train":
            stage.zero_grad()
            x = self.x.clone().requires_grad_()
            self._chunks = ([stage(x)], [self.dx]), [self.y.clone().requires_grad_()]
        elif workload.mode == "decode":
            sizes = range(workload.layers), workload.num_sequences, workload.seq
            first, second = (filled_cache(stage.config, *sizes, workload.device, workload.dtype) for _ in range(2))
            self._chunks = [self.x, None, first], [self.y, None, second]
        else:
            self._chunks = [self.x], [self.y]

    def sequential(self) -> Tensor:
        """Run the chunks one after the other. Returns the output of the second chunk (train: of the forward)."""
        first, second = self._chunks
        if self.workload.mode == "train":
            y = self.stage(*second)
            torch.autograd.backward(*first)
            return y
        with torch.no_grad():
            self.stage(*first)
            return self.stage(*second)

    def overlapped(self) -> Tensor:
        """Run both chunks interleaved. Returns the same output as `sequential`."""
        first, second = self._chunks
        stage = self.stage
        if self.workload.mode == "train":
            return stage.overlapped_forward_backward(stage, second, None, None, stage, None, *first)[0]
        with torch.no_grad():
            return stage.interleaved_forward(stage, first, stage, second)[1]
