"""Train a Mixture-of-Experts transformer under DualPipe.

    python train.py                                        one process, on a GPU or the CPU
    torchrun --nproc-per-node 2 train.py --preset tiny     two processes, DualPipe
    python train.py --help                                 the options

`moe-dualpipe train` is the same command. The code is in moe_dualpipe/training/: loop.py is a run on a page.
"""

import moe_dualpipe.quiet_start  # noqa: F401 - first
from moe_dualpipe.commands.train import main

if __name__ == "__main__":
    main()
