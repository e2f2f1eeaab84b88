"""Check a layer of one's own against its contract: `check_experts`.

A check builds small layers on one device and needs a few seconds. The classes are those that `ModelConfig` accepts.
"""

import dataclasses
from typing import Any

from ..models.build_experts import expert_class
from ..models.config import ModelConfig
from ..models.layer_class import Factory
from ..models.layer_options import LayerOptions
from ..user_errors import Place
from .experts_laws import experts_laws
from .experts_subject import Experts
from .laws import check_laws
from .report import Report

SMALL = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=2, num_dense_layers=0, num_heads=4, num_kv_heads=2, head_dim=6,
    kv_rank=10, rope_dim=4, value_dim=5, dense_size=20, expert_size=12, num_experts=4, experts_per_token=2,
    num_shared_experts=0, init_std=0.3,
)  # fmt: skip
"""The sizes of checks, if no configuration is given. Different sizes differ, so that mixing them up is an error."""


def check_experts(
    experts: str | Factory, options: LayerOptions = "", config: ModelConfig = SMALL, device: str = "cpu",
    raise_errors: bool = False,
) -> Report:  # fmt: skip
    """Check an expert layer (`ExpertLayer`): a class or function, or its name such as "my_file.py:MyExperts".

    options: the layer's own options, as "rank=8", a mapping or a dataclass. config: the sizes of the layer; an even
    number of experts includes expert parallelism. raise_errors: raise exceptions of the layer instead of reporting
    them. Raises ValueError if there is no such class or its arguments do not fit.
    """
    config = dataclasses.replace(config, experts=experts, expert_options=options)
    found = expert_class(config)
    subject = Experts(config, device)
    return check_laws(f"experts {found.name}", _where(found.make), subject, experts_laws(), raise_errors)


def _where(source: Any) -> str:
    """The file and line of a class of the user, or of a function."""
    return str(Place.of(source) or "")
