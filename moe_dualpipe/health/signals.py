"""A first SIGTERM or SIGINT lets the run end in order; a second one ends the process at once.

Python runs a signal's handler when the main thread comes back to it, and from a collective operation that may be never.
So a thread listens for the byte that C writes for every signal, and the handlers do nothing.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether this process was asked to stop."""

    requested = False

    def __init__(self, announce: bool = True):
        self.announce = announce

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to signals meanwhile. Only in the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
        waker = signal.set_wakeup_fd(writer.fileno())
        listener = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(waker)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()  # which ends the listener
            listener.join()
            reader.close()

    def _listen(self, reader: socket.socket) -> None:
        while received := reader.recv(1):
            number = received[0]
            if number not in STOPPING:
                continue
            if self.requested:
                os._exit(128 + number)  # as a shell reports a process that a signal ended
            self.requested = True
            if self.announce:
                name = signal.Signals(number).name
                os.write(2, f"\n{name}: this step will be finished and saved; once more: stop at once\n".encode())
