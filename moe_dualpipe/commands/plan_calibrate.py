"""`moe-dualpipe plan calibrate`: measure this machine, and write a device file for the planner."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from ..messages import check_range, printable

if TYPE_CHECKING:
    from ..tools.planner.calibration.device_file import Machine


@dataclass(frozen=True)
class CalibrateCommand:
    """Measure the speed of this machine, and write a file for --gpu of `plan estimate` and `plan search`."""

    out: Annotated[Path, arg(metavar="FILE")] = Path("machine.json")
    """File to write. Its name without .json is the name of the device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to measure: one GPU, or one core. auto: cuda if there is a GPU."""
    seconds: float = 0.2
    """Minimum seconds for each of about 50 measurements."""

    def run(self) -> None:
        """Raises ValueError for invalid options."""
        from ..runtime.launch import choose_device, count_gpus
        from ..tools.drawing.output import check_output

        check_output(self.out, [".json"])
        check_range("--seconds", self.seconds, 0.001, 60)
        import torch

        from ..tools.planner.calibration import device_value, measure, to_text

        device, gpus = choose_device(self.device, count_gpus(), 1), count_gpus()
        machine = _machine(device, gpus if device == "cuda" else len(os.sched_getaffinity(0)), self.out.stem)
        value = device_value(machine, measure(torch.device(device), self.seconds))
        self.out.write_text(to_text(value))
        print(f"{_summary(value, machine.precision)}\nwrote {printable(self.out)}")


def _machine(device: str, devices: int, name: str) -> "Machine":
    """What is known without measuring."""
    import torch

    from ..data import strict_json
    from ..tools.planner.calibration.device_file import Machine
    from ..tools.planner.device import FOLDER
    from ..tools.planner.flops import known_device

    software = f"torch {torch.__version__}"
    if device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(name, "fp32", memory / devices / 1e9, 1, software, devices)
    properties = torch.cuda.get_device_properties(0)
    known = known_device(properties.name)
    value = strict_json.read_named(FOLDER / f"{known}.json") if known else None
    memory, sms = properties.total_memory / 1e9, properties.multi_processor_count
    return Machine(name, "bf16", memory, sms, software, devices, value)


def _summary(value: dict[str, Any], precision: str) -> str:
    curves = value["efficiency"]
    lines = [f"{'peak':<19} {value['peak'][precision] / 1e9:,.1f} GFLOP/s in {precision}"]
    for kind in ("product", "grouped", "attention_forward", "attention_backward"):
        points = "  ".join(f"{flops:.0e}: {share:.2f}" for flops, share in curves[kind][precision])
        lines.append(f"{kind.replace('_', ' '):<19} {points}")
    passes = value["memory_bandwidth"] * curves["memory"]
    lines.append(f"{'memory':<19} {value['memory_bandwidth'] / 1e9:.1f} GB/s, element-wise {passes / 1e9:.1f} GB/s")
    lines.append(f"{'launch':<19} {value['launch'] * 1e6:.1f} us")
    return "\n".join(lines)
