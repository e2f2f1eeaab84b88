"""Expert parallelism: one protocol, one backend a file."""

from .all_to_all import AllToAll
from .autograd import combine, dispatch
from .local import Local
from .protocol import Combined, ExpertParallel, Pending, Ready, Received, Route

__all__ = [
    "AllToAll",
    "Combined",
    "ExpertParallel",
    "Local",
    "Pending",
    "Ready",
    "Received",
    "Route",
    "combine",
    "dispatch",
]
