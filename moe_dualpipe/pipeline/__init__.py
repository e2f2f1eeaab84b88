"""A model divided over ranks, as every training loop needs it: stages, links, sums of gradients, loads of experts.

It combines the lower-level packages, and knows nothing of files, runs or commands.
"""

from .balance import Balance
from .freezing import freeze, is_frozen
from .pipeline import Pipeline
from .settings import Numerics, Parallel
from .slot_transfer import SlotTransfer, check_alike

__all__ = ["Balance", "Numerics", "Parallel", "Pipeline", "SlotTransfer", "check_alike", "freeze", "is_frozen"]
