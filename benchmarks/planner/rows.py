"""Published runs as workloads of the planner.

A row of benchmarks/published_runs has what its source states, in the words of the source. Its `planned` has the same in
the terms of the planner, with what the source leaves open filled in (README.md there says how). `planned` is null for a
run that leaves too much open.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_dualpipe.tools.planner.constants import family_of
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.routing import VIOLATION
from moe_dualpipe.tools.planner.workload import Workload, layout_of


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
    """None for a row that the planner cannot predict."""
    planned = record["planned"]
    if planned is None:
        return None
    layout = layout_of(
        record["num_gpus"], record["tp"], record["pp"], planned["vpp"], record["ep"] or 1, planned["cp"]
    )  # fmt: skip
    load = Workload(
        replace(read_shape(planned["shape"]), mtp=planned["mtp"]), load_device(planned["device"]), layout,
        record["seq"], planned["micro_batch"], record["global_batch"], planned["precision"], planned["schedule"],
        planned["recompute"], planned["ep_backend"], planned["overlap"], VIOLATION if planned["real_routing"] else 0.0,
        attention=planned["attention"], cuda_graphs=planned["cuda_graphs"],
    )  # fmt: skip
    return Row(record, load, planned["software"])
