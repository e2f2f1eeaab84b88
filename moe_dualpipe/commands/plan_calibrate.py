"""`moe-dualpipe plan calibrate`: measure this machine, and write a device file for the planner."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from tyro.conf import arg

from ..messages import printable
from ..runtime.launch import choose_device, count_gpus
from ..tools.drawing.output import check_output
from ..tools.planner.calibration import calibrate, to_text
from .options import DeviceOption, check_ranges


@dataclass(frozen=True)
class CalibrateCommand(DeviceOption):
    """Measure the speed of this machine, and write a file for --gpu of `plan estimate` and `plan search`."""

    out: Annotated[Path, arg(metavar="FILE")] = Path("machine.json")
    """File to write. Its name without .json is the name of the device."""
    seconds: float = 0.2
    """Minimum seconds for each of about 50 measurements."""

    def run(self) -> None:
        """Raises ValueError for invalid options, and for a device on which something fails."""
        check_output(self.out, [".json"])
        check_ranges(self, 0.001, "seconds", high=60)
        gpus = count_gpus()
        device = choose_device(self.device, gpus, 1)
        devices = gpus if device == "cuda" else len(os.sched_getaffinity(0))
        value = calibrate(self.out.stem, torch.device(device), devices, self.seconds)
        self.out.write_text(to_text(value))
        print(f"wrote {printable(self.out)}")
