"""How NCCL sends between ranks: as its own log says.

NCCL chooses a transport for each pair of ranks, and silently falls back to TCP if it finds no InfiniBand. Only its log
says which, so the log is written to a temporary file and read.
"""

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

_CHANNEL = re.compile(r"Channel \w+(?:/\w+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")


def read_transports(log: str) -> dict[tuple[int, int], str]:
    """The transport from one rank to another: P2P, SHM, NET/IB, NET/Socket ...

    Example: "... Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/3/GDRDMA" -> {(0, 2): "NET/IB"}.
    """
    return {(int(source), int(to)): _kind(path) for source, to, path in _CHANNEL.findall(log)}


def _kind(path: str) -> str:
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "NET" else parts[0]


class NcclLog:
    """NCCL's log in a temporary file. Create it before NCCL starts. A log that the user has asked for is left alone."""

    def __init__(self) -> None:
        self.path: Path | None = None
        if "NCCL_DEBUG" not in os.environ and "NCCL_DEBUG_FILE" not in os.environ:
            handle, name = tempfile.mkstemp(prefix="nccl-", suffix=".log")
            os.close(handle)
            self.path = Path(name)
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P", "NCCL_DEBUG_FILE": name}

    def transports(self) -> dict[tuple[int, int], str]:
        """What NCCL has written so far."""
        if self.path is None:
            return {}
        with suppress(OSError):
            return read_transports(self.path.read_text(errors="replace"))
        return {}

    def close(self) -> None:
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink()
