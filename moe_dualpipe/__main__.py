"""`python -m moe_dualpipe`: the same as `moe-dualpipe`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
