"""Expert parallelism: send tokens to the ranks that hold their experts, and bring the results back.

`ExpertParallel` (protocol.py) is the interface; each backend is a file or a folder. Those in modeled/ simulate links.
"""

from .all_to_all import AllToAll
from .autograd import combine, dispatch
from .backend import ChosenBackend, choose_backend
from .by_choice import ByChoice
from .fp8_dispatch import Fp8Dispatch
from .local import Local
from .modeled.link import Link
from .modeled.loopback import Loopback, Replay
from .options import EpBackend
from .protocol import Combined, Completed, ExpertParallel, Pending, Received, Route
from .shared import Shared

__all__ = [
    "AllToAll", "ByChoice", "ChosenBackend", "Combined", "Completed", "EpBackend", "ExpertParallel", "Fp8Dispatch",
    "Link", "Local", "Loopback", "Pending", "Received", "Replay", "Route", "Shared", "choose_backend", "combine",
    "dispatch",
]  # fmt: skip
