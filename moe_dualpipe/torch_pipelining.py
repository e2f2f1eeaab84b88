"""torch.distributed.pipelining with our overlap: the path that programs import (integrations/torch_pipelining.py)."""

from .integrations.torch_pipelining import register

__all__ = ["register"]
