"""What is known of this machine before it is measured, and what was measured, in words."""

import os
from typing import Any

import torch

from ....data import strict_json
from ..device import FOLDER
from ..flops import known_device
from .device_file import Machine


def this_machine(device: str, devices: int, name: str) -> Machine:
    """What is known of each of `devices` devices of this machine without measuring. name: of the device file."""
    software = f"torch {torch.__version__}"
    if device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(name, "fp32", memory / devices / 1e9, 1, software, devices)
    properties = torch.cuda.get_device_properties(0)
    known = known_device(properties.name)
    value = strict_json.read_named(FOLDER / f"{known}.json") if known else None
    memory, sms = properties.total_memory / 1e9, properties.multi_processor_count
    return Machine(name, "bf16", memory, sms, software, devices, value)


def measured_text(value: dict[str, Any], precision: str) -> str:
    """The speeds in a device file, one line each."""
    curves = value["efficiency"]
    lines = [f"{'peak':<19} {value['peak'][precision] / 1e9:,.1f} GFLOP/s in {precision}"]
    for kind in ("product", "grouped", "attention_forward", "attention_backward"):
        points = "  ".join(f"{flops:.0e}: {share:.2f}" for flops, share in curves[kind][precision])
        lines.append(f"{kind.replace('_', ' '):<19} {points}")
    passes = value["memory_bandwidth"] * curves["memory"]
    lines.append(f"{'memory':<19} {value['memory_bandwidth'] / 1e9:.1f} GB/s, element-wise {passes / 1e9:.1f} GB/s")
    lines.append(f"{'launch':<19} {value['launch'] * 1e6:.1f} us")
    return "\n".join(lines)
