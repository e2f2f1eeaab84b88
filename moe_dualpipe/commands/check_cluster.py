"""`moe-dualpipe check cluster`: check the machines of a run before it starts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..command_line import Mark
from ..messages import check_range
from .options import DeviceOption, JsonOption


@dataclass(frozen=True)
class CheckCluster(DeviceOption, JsonOption):
    """Check this machine or, under torchrun, all machines of a run: their versions, speed, links and output folder."""

    out: Path = Path("runs")
    """Output folder of the run. Its disk is checked."""
    min_free: Annotated[float, Mark("GB")] = 10.0
    """Free space that the output folder needs."""
    size: Annotated[float, Mark("MB")] = 16.0
    """Size of a message on a link."""
    timeout: Annotated[float, Mark("SECONDS")] = 60.0
    """Seconds to wait for other ranks, and for each measurement."""

    def run(self) -> int:
        """Print the report on rank 0. Returns the exit code: 1 if there are problems. Raises ValueError for options."""
        check_range("--size", self.size, 0.001, 16_384)
        check_range("--timeout", self.timeout, 0.1, 86_400)
        check_range("--min-free", self.min_free, 0, 1e9)
        # torch would print a stack trace for each connection that fails. The error has a line instead.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from ..health.report import end_process
        from ..runtime.launch import Launch
        from ..tools.cluster import check_cluster

        launch, size, min_free = Launch.from_environment(), int(self.size * 1e6), int(self.min_free * 1e9)
        try:
            report = check_cluster(launch, self.out, size, self.timeout, min_free, self.device)
        except ValueError as error:  # each machine has its own
            end_process(2, f"moe-dualpipe: error: {error}\n" if launch.local_rank == 0 else "")
        if launch.rank == 0:
            self.show(report.to_json(), str(report))
        return int(bool(report.problems))
