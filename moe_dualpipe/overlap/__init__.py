"""What lets one chunk's work run beside another's."""

from .weight_grads import WeightGrads, accumulate, bind

__all__ = ["WeightGrads", "accumulate", "bind"]
