"""Meet the other ranks at the rendezvous store, without a process group.

The store needs one TCP connection from each rank to one machine. So ranks can exchange facts and failures there even if
they cannot reach each other. All waits end in time: keys are polled, because a wait in C++ cannot be interrupted.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...runtime.launch import Launch
from .probes import AGENT_STORE

_POLL = 0.01


class Meeting:
    """The rendezvous store of `launch`. Messages are JSON, and each has a key that no other message has."""

    def __init__(self, launch: Launch, timeout: float):
        """Connect. Raises ConnectionError if the store does not answer."""
        self.rank, self.size, self.timeout = launch.rank, launch.world_size, timeout
        self.prefix = f"check cluster/{launch.restarts}"
        opens = launch.rank == 0 and os.environ.get(AGENT_STORE) != "True"
        self.store = dist.PrefixStore(self.prefix, connect(opens, timeout))

    def tell(self, key: str, message: Any) -> None:
        self.store.set(key, json.dumps(message))

    def knows(self, key: str) -> bool:
        return self.store.check([key])

    def hear(self, key: str, seconds: float) -> Any:
        """The message of `key`. Raises TimeoutError if there is none after `seconds`."""
        end = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > end:
                raise TimeoutError(f"no message {key!r} for {seconds:g} s")
            time.sleep(_POLL)
        return json.loads(self.store.get(key))

    def collect(
        self, key: str, seconds: float, enough: Callable[[], bool] = lambda: False
    ) -> tuple[dict[int, Any], list[int]]:
        """The messages "key/rank" of all ranks, by rank, and the ranks without one after `seconds`.

        enough: called now and then; if it returns True, the others have 2 more seconds.
        """
        heard: dict[int, Any] = {}
        end = time.monotonic() + seconds
        for rank in range(self.size):
            while not self.knows(f"{key}/{rank}") and time.monotonic() < end:
                if enough():
                    end = min(end, time.monotonic() + 2)
                time.sleep(_POLL)
            if self.knows(f"{key}/{rank}"):
                heard[rank] = json.loads(self.store.get(f"{key}/{rank}"))
        return heard, [rank for rank in range(self.size) if rank not in heard]

    def store_for_group(self) -> dist.Store:
        """The same store over a connection of its own: the waits of a process group must not delay messages."""
        return dist.PrefixStore(f"{self.prefix}/group", connect(False, self.timeout))

    def leave(self, ranks: int, seconds: float) -> None:
        """Rank 0 waits until `ranks` ranks leave: the store may be in its process."""
        left = self.store.add("left", 1)
        end = time.monotonic() + seconds
        while self.rank == 0 and left < ranks and time.monotonic() < end:
            time.sleep(_POLL)
            left = self.store.add("left", 0)


def connect(opens: bool, timeout: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT. opens: it does not exist yet.

    Raises ValueError without these variables, and ConnectionError without an answer.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ValueError("MASTER_ADDR and MASTER_PORT must be set, as torchrun does: they say where ranks meet")
    if not opens:
        _wait_for_server(host, int(port), timeout)
    wait = timedelta(seconds=timeout)
    return dist.TCPStore(host, int(port), None, opens, timeout=wait, wait_for_workers=False)


def _wait_for_server(host: str, port: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                reason = error.strerror or str(error)
                raise ConnectionError(f"waited {seconds:g} s for {host}:{port}: {reason}") from None
        time.sleep(0.1)
