"""The console script `moe-dualpipe`, and `python -m moe_dualpipe`."""

import sys

from . import quiet_start  # noqa: F401 - first
from .cli import main

if __name__ == "__main__":
    sys.exit(main())
