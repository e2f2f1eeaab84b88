"""Expert parallelism by copies between GPUs, which occupy no multiprocessor: for a few tokens per rank, as in decoding.

copies.py sends messages, backend.py is the backend. The kernels are those of symmetric/.
"""

from .backend import CopyEngine

__all__ = ["CopyEngine"]
