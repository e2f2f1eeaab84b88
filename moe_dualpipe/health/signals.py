"""A signal ends a process at once before training, and after the step and a checkpoint during training.

SIGINT and SIGTERM are orders: the second one ends the process at once. The others announce the end: a terminal was
closed (SIGHUP), a job has little time left (SIGUSR1, SIGUSR2), or no more CPU time (SIGXCPU, sent every second).

Python runs a signal handler only when the main thread executes Python code. During a collective operation that may be
never. So the handlers do nothing, and a thread reads the byte that C code writes for each signal.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .report import end_process, print_now, program_name

ORDERS = (signal.SIGINT, signal.SIGTERM)
STOP_SIGNALS = (*ORDERS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Stop:
    """Whether a signal has requested that this process stop. announce: print a message for each signal."""

    requested = False
    completes = ""
    """What the process completes after a signal, for its message. While it is "", a signal ends the process at once."""

    def __init__(self, announce: bool = True):
        self.announce = announce

    @contextmanager
    def on_signals(self) -> Iterator["Stop"]:
        """Handle signals inside this context, but not those that nohup ignores. Main thread only."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        wakeup_fd = signal.set_wakeup_fd(writer.fileno())  # before the handlers: no signal is lost in between
        handled = [n for n in STOP_SIGNALS if n in ORDERS or signal.getsignal(n) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
        listener = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        listener.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(wakeup_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            writer.close()  # ends the listener
            listener.join()
            reader.close()

    def _listen(self, reader: socket.socket) -> None:
        ordered = False
        while received := reader.recv(1):
            number = received[0]
            if number not in STOP_SIGNALS:
                continue
            code, name = 128 + number, signal.Signals(number).name  # the exit code that shells use for signals
            order = number in ORDERS
            if order and ordered:
                end_process(code)
            if not self.completes:
                rank = f"{program_name()}: rank {os.environ.get('RANK', '0')}"
                end_process(code, f"{rank} stops: {name} before the first step\n")
            ordered |= order
            if self.announce and (order or not self.requested):
                repeat = "; repeat to stop now" if order else ""
                print_now(f"\n{name}: stopping after {self.completes}{repeat}\n")
            self.requested = True
