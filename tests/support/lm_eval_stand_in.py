"""A stand-in for lm-evaluation-harness, which has many dependencies: the names that its models are built from.

`tests/integrations/test_lm_eval.py` compares it with the real one where that is installed.
"""

import abc
import sys
from types import ModuleType, SimpleNamespace


class LM(abc.ABC):
    def __init__(self):
        self._rank, self._world_size, self._device = 0, 1, None
        self.cache_hook = SimpleNamespace(add_partial=lambda *_: None)

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...

    @property
    def device(self):
        return self._device


def install(patch):
    """Put the stand-in where the harness would be, until the patch is undone."""
    modules = {
        name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    }
    modules["lm_eval.api.model"].LM = LM  # type: ignore[attr-defined]
    modules["lm_eval.api.registry"].register_model = lambda _name: lambda cls: cls  # type: ignore[attr-defined]
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
