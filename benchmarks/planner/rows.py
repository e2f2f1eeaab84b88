"""Published runs as workloads of the planner.

A row says what its source states (published_runs.json). What a source leaves open is filled in here, in one place, with
the reason; rows that leave too much open have no workload.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_dualpipe.models.shape import ModelShape
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.tools.planner.constants import family_of
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.routing import VIOLATION
from moe_dualpipe.tools.planner.workload import Workload, layout_of

MODELS = {"internal-352b": "megascale-352b", "llama3.1-70b": "llama3-70b", "llama3.1-8b": "llama3-8b",
          "deepseek-v3-671b": "deepseek-v3", "deepseekv3": "deepseek-v3", "gpt-1008.0b": "gpt-1008b",
          "qwen3-30b": "qwen3-30b-a3b"}  # fmt: skip
"""Names of rows that differ from those of the planner."""
MEGATRON = ("bridge", "modelzoo", "moe-recipes", "overlap-AB", "recompute-", "division-", "megatron-llama")
"""Starts of the names of groups that were run with Megatron-Core."""
FLASH2 = ("torchtitan", "mpt", "automodel")
"""Starts of the names of groups whose attention is FlashAttention-2 or PyTorch's own kernel."""
NO_FLASH = ("megatron-sc21", "zero-bubble")
"""Groups of runs from before flash attention, or without it."""
INTERLEAVED = {"megascale-moe": 4, "llama3-paper": 8}
"""Stages of a rank in groups whose rows do not say it. megascale-moe: the scaling of the rows (240 to 1440 GPUs) shows
that stages are interleaved. llama3-paper: the first and the last stage have only the embedding and only the head (arXiv
2407.21783, section 3.3.2), so that 126 layers on 16 ranks have one layer in each other stage."""


@dataclass(frozen=True)
class Row:
    """A published run that the planner can predict."""

    record: dict[str, Any]
    load: Workload
    software: str

    @property
    def name(self) -> str:
        return f"{self.load.shape.name} {self.load.device.name} x{self.load.layout.num_ranks}"

    @property
    def family(self) -> str:
        """The family of the model: rows of one family are left out together."""
        return family_of(self.load.shape.name)

    @property
    def configuration(self) -> tuple[object, ...]:
        """Rows of one configuration were run alike, by one software."""
        load = self.load
        numbers = load.seq, load.micro_batch, load.global_batch, load.shape.mtp
        names = load.precision, load.schedule, load.recompute, load.ep_backend, load.overlaps, load.violation
        return load.shape.name, load.device.name, load.layout, numbers, names, load.cuda_graphs, self.software

    @cached_property
    def seconds(self) -> float:
        """The measured step time."""
        value, load = self.record["value"], self.load
        gpus, tokens = load.layout.num_ranks, load.tokens
        match self.record["metric"]:
            case "step_time_s":
                return value
            case "tokens/s/GPU":
                return tokens / gpus / value
            case "samples/s/GPU":
                return load.global_batch / gpus / value
            case "GPU_hours_per_1T_tokens":
                return tokens / gpus * value * 3600 / 1e12
            case "model_tflops/s/GPU":
                return tokens * load.shape.train_flops(load.seq) / gpus / (value * 1e12)
            case "hardware_tflops/s/GPU":
                return tokens * hardware_flops(load) / gpus / (value * 1e12)
        raise ValueError(f"unknown metric {self.record['metric']}")


def hardware_flops(load: Workload) -> float:
    """FLOPs of a token with full recomputation and without the causal mask: arXiv 2104.04473, equation 3."""
    shape, hidden, seq = load.shape, load.shape.hidden, load.seq
    layers = len(shape.layers)
    return 96 * layers * hidden**2 * (1 + seq / (6 * hidden) + shape.vocab / (16 * layers * hidden))


def read_rows(files: Sequence[Path]) -> list[Row]:
    """The rows that can be predicted."""
    records = [record for file in files for record in json.loads(file.read_text())]
    return [row for record in records if (row := row_of(record)) is not None]


def row_of(record: dict[str, Any]) -> Row | None:
    """None if the row does not say how the work was divided, or needs what the planner does not model."""
    needed = ("num_gpus", "pp", "seq", "global_batch", "tp", "value", "precision")
    if any(record.get(key) is None for key in needed) or "ZB-2p" in record["notes"]:
        return None
    notes = record["notes"].lower()
    try:
        shape, device = read_shape(_model(record["model"])), load_device(_device(record, notes))
    except ValueError:
        return None
    if "as with one mtp module" in notes or "with mtp" in record["model"].lower().replace("w/ ", "with "):
        shape = replace(shape, mtp=1)
    gpus, tp, pp, dp = record["num_gpus"], record["tp"], record["pp"], record["dp"]
    cp = record["cp"] or 1
    if dp and gpus // (tp * pp * dp) > cp:
        cp = gpus // (tp * pp * dp)  # sequence parallelism of attention, as in MegaScale
    vpp = record["vpp"] or INTERLEAVED.get(record["group"], 1)
    layout = layout_of(gpus, tp, pp, vpp, record["ep"] or 1, cp)
    load = Workload(
        shape, device, layout, record["seq"], _micro_batch(record, layout), record["global_batch"],
        _precision(record["precision"]), _schedule(vpp, notes), _recompute(record, shape), _backend(record, notes),
        _overlap(notes), _violation(record, notes),
        attention=_attention(record), cuda_graphs=_cuda_graphs(notes),
    )  # fmt: skip
    return Row(record, load, _software(record, notes))


def _model(name: str) -> str:
    key = re.sub(r"\s*\(.*|\s+moe\b.*", "", name.lower()).strip().replace("_", "-").replace(" ", "-")
    return MODELS.get(key, key)


def _device(record: dict[str, Any], notes: str) -> str:
    slow = "hbm2e" in notes or "HBM2e" in record["gpu"]
    return "h100-hbm2e" if slow else record["gpu"].split()[0].split("-")[0]


def _attention(record: dict[str, Any]) -> Any:
    if record["group"] in NO_FLASH:
        return "plain"
    return "flash2" if record["group"].startswith(FLASH2) else "fastest"


def _cuda_graphs(notes: str) -> Any:
    if "full cuda graphs" in notes:
        return "full"
    absent = "no cuda graphs" in notes or "cuda graphs off" in notes or "without cuda graphs" in notes
    return "partial" if "cuda graph" in notes and not absent else "none"


def _micro_batch(record: dict[str, Any], layout: Layout) -> int:
    if record["micro_batch"]:
        return record["micro_batch"]
    each = record["global_batch"] // layout.dp
    return 1 if layout.pp > 1 else max(n for n in (1, 2, 4) if each % n == 0)


def _precision(text: str) -> Any:
    text = text.lower()
    return "mxfp8" if "mx" in text else "fp8" if "fp8" in text or "float8" in text else "bf16"


def _schedule(vpp: int, notes: str) -> str:
    if "dualpipe" in notes:
        return "dualpipe"
    if "zb-1p" in notes:
        return "zb1p"
    return "interleaved_1f1b" if vpp > 1 else "1f1b"


def _recompute(record: dict[str, Any], shape: ModelShape) -> Any:
    """The kind of the planner whose FLOPs are nearest to those of the parts that a run computes again.

    Megatron names the parts. torchtitan's "selective" saves attention and every other product, and computes the rest
    again (torchtitan/distributed/activation_checkpoint.py).
    """
    text, hidden = (record["recompute"] or "").lower(), shape.hidden
    if text.startswith("full"):
        return "full"
    scores = shape.score_flops(record["seq"])
    products = sum(layer.flops(hidden) for layer in shape.layers)
    attention = sum(layer.attention.flops(hidden) for layer in shape.layers)
    experts = sum(layer.flops(hidden) - layer.attention.flops(hidden) for layer in shape.layers if layer.experts)
    parts = {"core_attn": scores, "moe": experts, "mlp": products - attention - experts}
    again = sum(parts.get(name, 0) for name in text.split(", "))
    if text.startswith("selective") and record["group"].startswith("torchtitan"):
        again = products // 2
    least = "norms" if "norm" in text or "selective" in text else "none"
    kinds = {least: 0, "attention": attention + scores, "full": products + scores}
    return min(kinds, key=lambda kind: abs(kinds[kind] - again))


def _backend(record: dict[str, Any], notes: str) -> Any:
    if "nccl all-to-all" in notes:
        return "all_to_all"
    if "hybridep" in notes:
        return "hybrid"
    if "deepep" in notes or record["group"] == "deepseek":
        return "deepep"
    # Megatron-Bridge's recipes use HybridEP or DeepEP unless they say otherwise.
    return "hybrid" if record["group"].startswith("bridge") else "all_to_all"


def _overlap(notes: str) -> bool:
    if "overlap off" in notes or "no overlap" in notes:
        return False
    return "overlap" in notes or "dualpipe" in notes or notes.startswith("megascale")


def _violation(record: dict[str, Any], notes: str) -> float:
    """MaxVio of the run: real training is uneven, and benchmarks force balance."""
    real = "natural" in notes or "real routing" in notes or record["group"] in ("deepseek", "megascale-moe")
    return VIOLATION if real else 0.0


def _software(record: dict[str, Any], notes: str) -> str:
    group = record["group"]
    if group == "megascale-moe":
        return "megascale" if notes.startswith("megascale") else "megatron"
    if group.startswith(MEGATRON):
        return "megatron"
    return group.split("-")[0] if group.startswith("torchtitan") else group
