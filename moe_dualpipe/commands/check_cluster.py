"""`moe-dualpipe check cluster`: check the machines of a run before it starts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..command_line import Mark
from ..health.report import end_process
from ..messages import check_range
from ..runtime.launch import Launch
from .options import DeviceOption, JsonOption


@dataclass(frozen=True)
class CheckCluster(DeviceOption, JsonOption):
    """Check this machine or, under torchrun, all machines of a run: versions, GPUs, links, clocks, folders, limits."""

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
        # torch would print a stack trace for each connection that fails. The report has a line instead.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from ..tools.cluster import Options, check_cluster, cluster_report

        size, min_free = int(self.size * 1e6), int(self.min_free * 1e9)
        options = Options(self.out, size, self.timeout, min_free, self.device)
        launch = Launch.from_environment()
        try:
            code, report = check_cluster(options, launch)
        except ConnectionError as error:
            end_process(1, f"moe-dualpipe: error: {error}\n" if launch.local_rank == 0 else "")
        if report is not None:
            self.show(report.to_json(), cluster_report(report))
        if launch.world_size > 1:
            end_process(code)  # its threads may wait for other ranks in C++
        return code
