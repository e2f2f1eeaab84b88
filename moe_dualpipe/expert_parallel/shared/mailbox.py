"""Small notices between the ranks of one machine, over Unix sockets. A notice may carry a file descriptor.

A rank that waits sleeps in the kernel until a notice arrives, a rank ends or the timeout expires: it occupies no core,
and the end of a process closes its sockets, however it ends. The sockets are in Linux's abstract namespace; elsewhere,
in a temporary folder that is removed once all ranks are connected.
"""

import hmac
import secrets
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist

from ...overlap.waits import waits_for_ranks
from ..gather import gather_objects

_SECRET = 16  # bytes
_HELLO = struct.Struct(f"=I{_SECRET}s")


class Notice(NamedTuple):
    """kind: what happened to `slot`. has_file: a file descriptor follows the notice.

    number: of the operation. rows: of its message. layout: a checksum of the widths and dtypes. freed: a bit for each
    slot of the receiver that the sender of the notice has read.
    """

    kind: int
    has_file: bool
    slot: int
    number: int = 0
    rows: int = 0
    layout: int = 0
    freed: int = 0


_FORMAT = struct.Struct("=B?BQQIB")
OnNotice = Callable[[int, Notice, int | None], None]


class Mailbox:
    """The connections of this rank to the other ranks of `group`. Creating it is collective.

    on_notice: called by `wait` with the sender, the notice and its file descriptor. timeout: seconds. Errors name ranks
    of the world; arguments are ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, on_notice: OnNotice):
        self.names, self.timeout, self._on_notice = dist.get_process_group_ranks(group), timeout, on_notice
        self._sockets = _connect(group, timeout)
        self._peers = {one.fileno(): peer for peer, one in self._sockets.items()}
        self._ended: set[int] = set()
        self._poll = select.poll()
        for number in self._peers:
            self._poll.register(number, select.POLLIN)

    def post(self, peer: int, notice: Notice, file: int | None = None) -> None:
        """Send a notice. A peer that has ended is reported when it is waited for."""
        try:
            self._sockets[peer].sendall(_FORMAT.pack(*notice))
            if file is not None:
                socket.send_fds(self._sockets[peer], [b" "], [file])
        except (BrokenPipeError, ConnectionResetError):
            pass

    @waits_for_ranks
    def wait(self, missing: Callable[[], list[int]], what: str) -> None:
        """Receive notices until `missing` returns no peers. Raises DistError if one of them ends or is too late."""
        end = time.monotonic() + self.timeout
        while peers := missing():
            if gone := self._ended & {*peers}:
                raise dist.DistError(f"{self._who(gone)} ended before {what}")
            ready = self._poll.poll(max(0.0, end - time.monotonic()) * 1000)
            if not ready:
                raise dist.DistError(f"no answer from {self._who(peers)} for {self.timeout:g} s before {what}")
            for number, _ in ready:
                self._receive(self._peers[number])

    def _receive(self, peer: int) -> None:
        one = self._sockets[peer]
        try:
            notice = Notice(*_FORMAT.unpack(one.recv(_FORMAT.size, socket.MSG_WAITALL)))
            file = socket.recv_fds(one, 1, 1)[1][0] if notice.has_file else None
        except (ConnectionResetError, struct.error, IndexError):  # the notice or its file has not arrived
            self._ended.add(peer)
            self._poll.unregister(one)
        else:
            self._on_notice(peer, notice, file)

    def _who(self, peers: Sequence[int] | set[int]) -> str:
        names = sorted(self.names[peer] for peer in peers)
        return f"rank{'s' * (len(names) > 1)} {', '.join(map(str, names))}"


def _connect(group: dist.ProcessGroup, timeout: float) -> dict[int, socket.socket]:
    """A connection to each other rank: every rank connects to those below it, and accepts those above it."""
    rank, size = group.rank(), group.size()
    with _listener(size + 16) as (listening, address):
        secret = secrets.token_bytes(_SECRET)
        known = gather_objects((address, secret), group)
        sockets = {}
        for peer in range(rank):
            sockets[peer] = one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.settimeout(timeout)
            one.connect(known[peer][0])
            one.sendall(_HELLO.pack(rank, known[peer][1]))
        for one, peer in _accept(listening, secret, size - 1 - rank, timeout):
            sockets[peer] = one
        for one in sockets.values():
            one.settimeout(None)
        return sockets


def _accept(
    listening: socket.socket, secret: bytes, number: int, timeout: float
) -> Iterator[tuple[socket.socket, int]]:
    """Accept `number` connections, each with the rank at its other end. Connections of other programs are closed.

    A connection that sends nothing does not hold up the others. Raises TimeoutError.
    """
    end, unknown = time.monotonic() + timeout, {listening.fileno(): listening}
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    try:
        while number:
            if not (ready := poll.poll(max(0.0, end - time.monotonic()) * 1000)):
                raise TimeoutError(f"{number} ranks of this machine did not connect within {timeout:g} s")
            for file, _ in ready:
                if file == listening.fileno():
                    one, _ = listening.accept()
                    unknown[one.fileno()] = one
                    poll.register(one, select.POLLIN)
                    continue
                poll.unregister(file)
                peer, shown = _HELLO.unpack(_first_words(unknown[file]).ljust(_HELLO.size)[: _HELLO.size])
                if hmac.compare_digest(shown, secret):
                    number -= 1
                    yield unknown.pop(file), peer
    finally:
        for one in unknown.values():
            if one is not listening:
                one.close()


def _first_words(one: socket.socket) -> bytes:
    """What has arrived: a rank sends its whole greeting at once."""
    with suppress(ConnectionResetError):
        return one.recv(_HELLO.size, socket.MSG_DONTWAIT)
    return b""


@contextmanager
def _listener(backlog: int) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its address, both of which are removed at the end."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        abstract = f"\0moe-dualpipe-{secrets.token_hex(8)}"
        address = abstract if sys.platform == "linux" else f"{folder}/socket"
        listening.bind(address)
        listening.listen(backlog)
        yield listening, address
