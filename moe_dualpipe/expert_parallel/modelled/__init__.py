"""Links that are not there: backends whose transfers take the time of a modelled network."""

from .delayed import Delayed
from .link import Link
from .loopback import Loopback, Replay

__all__ = ["Delayed", "Link", "Loopback", "Replay"]
