"""Expert parallelism between CPU ranks of one machine, by copies into memory that the ranks share.

memory.py makes and maps the memory, mailbox.py sends notices between ranks, backend.py is the backend.
"""

from .backend import Shared

__all__ = ["Shared"]
