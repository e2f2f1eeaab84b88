"""Check the layers that a configuration names, before anything is built."""

from .attention import attention_class
from .block import block_class
from .build_experts import expert_class
from .config import ModelConfig
from .router import router_class


def check_layers(config: ModelConfig) -> None:
    """Raise ValueError if a class that `config` names cannot be found or called, or does not have these options."""
    for find in (expert_class, router_class, attention_class, block_class):
        find(config)
