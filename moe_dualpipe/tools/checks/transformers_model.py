"""`moe-dualpipe check parallel MODEL`: a model of Hugging Face transformers, divided by its own plans, against itself.

transformers divides a model with the tensor-parallel and expert-parallel plans of its class. Here, the whole model runs
in one process, and then divided over two, on the same tokens: losses, logits and gradients must agree. If they differ,
the first module is named whose output, or whose gradient, differs.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...messages import describe, plural, printable
from .first_difference import Comparison, Kind, Trace
from .laws import Report
from .parallel import COMPARED, check_run, run_whole
from .run import OTHER_ROWS
from .subject import without_dropout

RANKS, _SEQUENCES = 2, 4
DIVISIONS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp_size": RANKS, "tp_plan": "auto"},
    "tp=2 x ep=2": {"tp_size": RANKS, "tp_plan": "auto", "ep_size": RANKS},
    "fsdp=2 x ep=2": {"fsdp_size": RANKS, "ep_size": RANKS},
}
"""The arguments of transformers' DistributedConfig."""


Change = Callable[[nn.Module], None]


def check_transformers(
    model: str, seq_len: int = 16, seed: int = 0, change: Change | None = None
) -> Report:  # fmt: skip
    """Compare a model, a folder or a name on the hub, with itself. change: called with each divided model, for tests.

    Raises ValueError if transformers 5 is not installed, or cannot load the model.
    """
    try:
        from transformers import AutoConfig
        from transformers.distributed import DistributedConfig  # noqa: F401 - transformers 5
    except ImportError as error:
        raise ValueError(f"needs transformers 5: pip install 'transformers>=5' ({describe(error)})") from None
    try:
        config: Any = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {printable(model)}: {describe(error)}") from None
    vocab = getattr(config.get_text_config(), "vocab_size", 2)
    tokens = torch.randint(vocab, (_SEQUENCES, seq_len), generator=torch.Generator().manual_seed(seed))
    sizes = f"{plural(_SEQUENCES, 'sequence')} of {plural(seq_len, 'token')}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "whole.pt"
        run_whole(printable(model), Comparison(partial(_run, model, tokens, "", None), OTHER_ROWS, file))
        runs = {name: partial(_run, model, tokens, name, change) for name in DIVISIONS}
        compared = {name: Comparison(run, OTHER_ROWS, file) for name, run in runs.items()}
        why = "transformers cannot run it here: "
        return Report(
            f"{printable(model)}: {sizes}{COMPARED}",
            tuple(check_run(name, RANKS, one, "skipped", why) for name, one in compared.items()),
        )


def _load(name: str, division: str, change: Change | None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    divided = {"distributed_config": DistributedConfig(**DIVISIONS[division])} if division else {}
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **divided).train()
    without_dropout(model)
    if change is not None:
        change(model)
    return model


def _run(
    name: str, tokens: Tensor, division: str, change: Change | None, trace: Trace, with_modules: bool
) -> None:  # fmt: skip
    """division: "" for the whole model. with_modules: show the trace what modules return, and get as the gradient."""
    model = _load(name, division, change)
    every = RANKS if "fsdp_size" in DIVISIONS.get(division, ()) else 1
    sequences = range(dist.get_rank() % every, _SEQUENCES, every)
    _see_parameters(trace, "weights", model)
    for module_name, module in model.named_modules() if with_modules else ():
        module.register_forward_hook(partial(_see, trace, module_name, sequences))
    tokens = tokens[[*sequences]]
    logits = model(tokens).logits
    losses = nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
    trace.see_tokens("logits", "logits", sequences, logits)
    trace.see_tokens("losses", "losses", sequences, losses)
    losses.mean().backward()
    _see_parameters(trace, "gradients", model)


def _see_parameters(trace: Trace, kind: Kind, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        tensor: Any = parameter if kind == "weights" else parameter.grad
        if tensor is not None:
            tensor = tensor.detach()
            trace.see(kind, name, {0: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor})


def _see(trace: Trace, name: str, sequences: Sequence[int], *called: Any) -> None:
    """A forward hook, which torch calls with the module, its inputs and its output."""
    y = called[-1][0] if isinstance(called[-1], tuple) else called[-1]
    if isinstance(y, Tensor) and y.ndim == 3 and len(y) == len(sequences) and not hasattr(y, "full_tensor"):
        trace.see_tokens("segments", f"the output of {name}", sequences, y)
        if y.requires_grad:
            gradient = f"the gradient of the output of {name}"
            # The loss is a mean over sequences.
            y.register_hook(lambda grad: trace.see_tokens("segments", gradient, sequences, len(sequences) * grad))
