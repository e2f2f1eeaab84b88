"""Expert parallelism: send tokens to the ranks that hold their experts, and bring the results back.

`ExpertParallel` (protocol.py) is the interface; each backend is a file or a folder. Those in modelled/ simulate links.
"""

from .all_to_all import AllToAll
from .autograd import combine, dispatch
from .local import Local
from .modelled.delayed import Delayed
from .modelled.link import Link
from .modelled.loopback import Loopback, Replay
from .protocol import Combined, Completed, ExpertParallel, Pending, Received, Route
from .shared import Shared

__all__ = [
    "AllToAll", "Combined", "Completed", "Delayed", "ExpertParallel", "Link", "Local", "Loopback", "Pending",
    "Received", "Replay", "Route", "Shared", "combine", "dispatch",
]  # fmt: skip
