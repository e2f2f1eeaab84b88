"""Backends with a simulated network: their transfers take the time of a modelled link."""

from .delayed import Delayed
from .link import Link
from .loopback import Loopback, Replay

__all__ = ["Delayed", "Link", "Loopback", "Replay"]
