"""`moe-dualpipe plan calibrate`: measure this machine, and write a device file for the planner."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from ..messages import printable
from ..runtime.launch import choose_device, count_gpus
from ..tools.drawing.output import check_output
from ..tools.planner.calibration import Plan, device_value, measure, to_text
from ..tools.planner.calibration.machine import measured_text, this_machine
from .options import DeviceOption, check_ranges


@dataclass(frozen=True)
class CalibrateCommand(DeviceOption):
    """Measure the speed of this machine, and write a file for --gpu of `plan estimate` and `plan search`."""

    out: Annotated[Path, arg(metavar="FILE")] = Path("machine.json")
    """File to write. Its name without .json is the name of the device."""
    processes: int | None = None
    """Processes that measure at the same time. None: one for each core, or for each GPU."""
    seconds: float = 0.2
    """Minimum seconds for each of about 50 measurements."""

    def run(self) -> None:
        """Raises ValueError for invalid options, and for a device on which something fails."""
        check_output(self.out, [".json"])
        check_ranges(self, 0.001, "seconds", high=60)
        check_ranges(self, 1, "processes", high=1024)
        gpus = count_gpus()
        cuda = choose_device(self.device, gpus, self.processes or 1) == "cuda"
        available = gpus if cuda else len(os.sched_getaffinity(0))
        large = {"widths": (256, 512, 1024, 2048, 4096, 8192), "numbers": 2**28, "message": 2**28}
        sizes: dict[str, Any] = large if cuda else {}
        plan = Plan("cuda" if cuda else "cpu", self.processes or available, seconds=self.seconds, **sizes)
        machine = this_machine(plan.device, plan.processes, self.out.stem)
        value = device_value(machine, measure(plan))
        self.out.write_text(to_text(value))
        print(f"{measured_text(value, machine.precision, plan.processes)}\nwrote {printable(self.out)}")
