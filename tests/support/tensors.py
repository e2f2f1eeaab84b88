"""The largest tensor that torch's operations return, in forward and backward."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperationStats(TorchDispatchMode):
    """Records the largest number of elements that any operation returns."""

    max_numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, torch.Tensor):
                self.max_numel = max(self.max_numel, t.numel())
        return result
