"""Train a Mixture-of-Experts transformer under DualPipe.

    python train.py                                        one process, on a GPU or the CPU
    torchrun --nproc-per-node 2 train.py --preset tiny     two processes, DualPipe
    python train.py --help                                 all options

The code is in moe_dualpipe/training/loop.py.
"""

from moe_dualpipe.health.signals import Stop
from moe_dualpipe.standard_streams import protect_streams

if __name__ == "__main__":
    protect_streams("stdout", "stderr")  # first: the next file would get the number of a closed stream
    with Stop().on_signals() as stop:
        from moe_dualpipe.training.loop import main  # imports torch, which takes seconds

        main(stop=stop)
