"""Programs import this first: Ctrl-C during their imports, which take seconds, ends them without a traceback."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not what nohup ignores
    signal.signal(signal.SIGINT, signal.SIG_DFL)
