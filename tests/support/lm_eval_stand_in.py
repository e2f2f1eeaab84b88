"""A stand-in for lm-evaluation-harness, which has many dependencies: the names that its models are built from.

`tests/integrations/test_lm_eval.py` compares it with the real one where that is installed.
"""

import abc
import sys
from types import ModuleType


class CacheHook:
    def __init__(self):
        self.added = []

    def add_partial(self, attr, req, res):
        self.added.append((attr, req, res))


class LM(abc.ABC):
    def __init__(self):
        self._rank, self._world_size, self._device, self.cache_hook = 0, 1, None, CacheHook()

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        return cls(**arg_dict, **{k: v for k, v in (additional_config or {}).items() if v is not None})

    @property
    def device(self):
        return self._device


MODELS = {}


def register_model(*names):
    def decorate(cls):
        MODELS.update(dict.fromkeys(names, cls))
        return cls

    return decorate


def get_model(model_name):
    return MODELS[model_name]


def install(patch):
    """Put the stand-in where the harness would be, until the patch is undone."""
    modules = {
        name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    }
    modules["lm_eval.api.model"].LM = LM  # type: ignore[attr-defined]
    registry = modules["lm_eval.api.registry"]
    registry.register_model, registry.get_model = register_model, get_model  # type: ignore[attr-defined]
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
