"""Train a Mixture-of-Experts transformer under DualPipe.

    python train.py                                        one process, on a GPU or the CPU
    torchrun --nproc-per-node 2 train.py --preset tiny     two processes, DualPipe
    python train.py --help                                 all options

`moe-dualpipe train` is the same command. The code is in moe_dualpipe/training/: main.py, loop.py.
"""

from moe_dualpipe.training.main import main

if __name__ == "__main__":
    main()
