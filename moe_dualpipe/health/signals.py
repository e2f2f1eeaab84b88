"""The first SIGTERM or SIGINT ends the run after its step and a checkpoint; the second ends the process now.

Python runs a signal handler only when the main thread executes Python code. During a collective operation that may be
never. So the handlers do nothing, and a thread reads the byte that C code writes for each signal.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether this process was asked to stop. announce: print a message when it is."""

    requested = False

    def __init__(self, announce: bool = True):
        self.announce = announce

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle signals inside this context. Main thread only."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        wakeup_fd = signal.set_wakeup_fd(writer.fileno())
        listener = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            writer.close()  # ends the listener
            listener.join()
            reader.close()

    def _listen(self, reader: socket.socket) -> None:
        while received := reader.recv(1):
            number = received[0]
            if number not in STOP_SIGNALS:
                continue
            if self.requested:
                os._exit(128 + number)  # the exit code that shells use for signals
            self.requested = True
            if self.announce:
                name = signal.Signals(number).name
                with suppress(OSError):  # stderr may be on a full disk
                    os.write(2, f"\n{name}: stopping after this step and a checkpoint; repeat to stop now\n".encode())
