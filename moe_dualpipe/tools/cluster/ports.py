"""Which program listens on a port of this machine."""

import os
import re
import socket
from contextlib import closing, suppress
from pathlib import Path

_LISTENS = "0A"


def port_user(port: int, processes: Path = Path("/proc")) -> str:
    """What listens on `port`, such as "python3 (process 4242)"; "" if the port is free. Linux tells the process."""
    if _is_free(port):
        return ""
    sockets = {inode for name in ("tcp", "tcp6") for inode in _listeners(processes / "net" / name, port)}
    for process in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to someone else
            for link in (process / "fd").iterdir():
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
                if match and match[1] in sockets:
                    return f"{(process / 'comm').read_text().strip()} (process {process.name})"
    return "another program"


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a run that has just ended is free
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _listeners(table: Path, port: int) -> list[str]:
    """The inodes of the sockets that listen on `port`, from a table such as /proc/net/tcp."""
    found = []
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _LISTENS and int(columns[1].rpartition(":")[2], 16) == port:
                found.append(columns[9])
    return found
