"""DeepSeek's interface, at the path that programs import (integrations/deepseek.py)."""

from .integrations.deepseek import (
    DualPipe,
    DualPipeV,
    WeightGradStore,
    run_backward,
    set_p2p_tensor_dtype,
    set_p2p_tensor_shapes,
)

__all__ = [
    "DualPipe", "DualPipeV", "WeightGradStore", "run_backward", "set_p2p_tensor_dtype", "set_p2p_tensor_shapes",
]  # fmt: skip
