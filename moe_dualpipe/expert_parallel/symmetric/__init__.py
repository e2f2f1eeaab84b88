"""Expert parallelism between GPUs that write into each other's memory, with Triton kernels of this project.

memory.py makes memory that all ranks map, backend.py is the backend. The kernels are in kernels/gpu/.
"""

from .backend import Symmetric
from .memory import DeviceMemory, MappedMemory, SharedMemory

__all__ = ["DeviceMemory", "MappedMemory", "SharedMemory", "Symmetric"]
