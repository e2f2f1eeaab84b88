"""moe-dualpipe: train Mixture-of-Experts transformers under DeepSeek's DualPipe schedule, anywhere.

The names that a program or a notebook needs (docs/python_api.md); the packages below have all others. They are imported
on first use: `import moe_dualpipe` imports no torch.

>>> import moe_dualpipe
>>> print(*moe_dualpipe.build_schedule("dualpipev", num_ranks=1, num_micro_batches=2).actions[0])
0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.huggingface import from_pretrained, save_pretrained
    from .commands.train import train
    from .data import load_data
    from .inference import generate
    from .models import ModelConfig, build_model, preset
    from .pipeline import Numerics, Parallel, Pipeline
    from .runtime import Executor, join_world
    from .runtime.learning_rate import OptimizerConfig, learning_rate
    from .schedule import Costs, simulate
    from .schedule import build as build_schedule
    from .training import TrainConfig, Trainer

__version__ = "0.1.0"
__all__ = [
    "Costs", "Executor", "ModelConfig", "Numerics", "OptimizerConfig", "Parallel", "Pipeline", "TrainConfig", "Trainer",
    "build_model", "build_schedule", "from_pretrained", "generate", "join_world", "learning_rate", "load_data",
    "preset", "save_pretrained", "simulate", "train",
]  # fmt: skip
_MODULES = {
    "Costs": "schedule", "Executor": "runtime", "ModelConfig": "models", "Numerics": "pipeline",
    "OptimizerConfig": "runtime.learning_rate", "Parallel": "pipeline", "Pipeline": "pipeline",
    "TrainConfig": "training", "Trainer": "training", "build_model": "models", "build_schedule": "schedule:build",
    "from_pretrained": "checkpoint.huggingface", "generate": "inference", "join_world": "runtime",
    "learning_rate": "runtime.learning_rate", "load_data": "data", "preset": "models",
    "save_pretrained": "checkpoint.huggingface", "simulate": "schedule", "train": "commands.train",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    return getattr(import_module(f".{module}", __name__), attribute or name)
