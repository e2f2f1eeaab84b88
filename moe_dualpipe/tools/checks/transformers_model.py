"""`moe-dualpipe check parallel MODEL`: a model of Hugging Face transformers, divided by its own plans, against itself.

transformers divides a model with the tensor-parallel and expert-parallel plans of its class. Here, the whole model runs
in one process, and then divided over two, on the same tokens: losses, logits and gradients must agree. If they differ,
the first module is named whose output, or whose gradient, differs.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...messages import describe, plural, printable
from .first_difference import Results, Trace, find_difference
from .laws import Report
from .parallel import judge
from .ranks import Failure, run_tasks
from .run import OTHER_ROWS
from .subject import without_dropout

RANKS, _SEQUENCES = 2, 4
DIVISIONS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp_size": RANKS, "tp_plan": "auto"},
    "tp=2 x ep=2": {"tp_size": RANKS, "tp_plan": "auto", "ep_size": RANKS},
    "fsdp=2 x ep=2": {"fsdp_size": RANKS, "ep_size": RANKS},
}
"""The arguments of transformers' DistributedConfig."""


@dataclass(frozen=True)
class _Task:
    """division: the name of one, or "" for the whole model. change: called with the model on each rank, for tests."""

    model: str
    tokens: Tensor
    folder: Path
    division: str = ""
    change: Callable[[nn.Module], None] | None = None


def check_transformers(
    model: str, seq_len: int = 16, seed: int = 0, change: Callable[[nn.Module], None] | None = None
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
    subject = f"{printable(model)}: {sizes}, compared with one process: relative differences, of their tolerances"
    with tempfile.TemporaryDirectory() as folder:
        whole = _Task(model, tokens, Path(folder))
        (done,) = run_tasks(1, _run_whole, [whole])
        if isinstance(done, Failure):
            raise ValueError(f"cannot run {printable(model)} in one process: {done.message}")
        tasks = [_Task(model, tokens, Path(folder), name, change) for name in DIVISIONS]
        outcomes = zip(DIVISIONS, run_tasks(RANKS, _run_divided, tasks), strict=True)
        why = "transformers cannot run it here: "
        return Report(subject, tuple(judge(name, outcome, "skipped", why) for name, outcome in outcomes))


def _load(task: _Task) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    divided = {"distributed_config": DistributedConfig(**DIVISIONS[task.division])} if task.division else {}
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, **divided).train()
    without_dropout(model)
    if task.change is not None:
        task.change(model)
    return model


def _run(task: _Task, sequences: Sequence[int], trace: Trace) -> Results:
    """The trace sees what each module returns, and gets as the gradient."""
    model = _load(task)
    for name, module in model.named_modules():
        module.register_forward_hook(partial(_see, trace, name, sequences))
    tokens = task.tokens[[*sequences]]
    logits = model(tokens).logits
    losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses.mean().backward()
    by_sequence = losses.detach().double().view(len(tokens), -1)
    return Results(
        weights={name: _whole(p.detach()) for name, p in model.named_parameters()},
        logits={(0, s): logits[i].detach() for i, s in enumerate(sequences)},
        losses={(0, s): by_sequence[i] for i, s in enumerate(sequences)},
        gradients={name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None},
    )


def _see(trace: Trace, name: str, sequences: Sequence[int], *called: Any) -> None:
    """A forward hook, which torch calls with the module, its inputs and its output."""
    y = called[-1][0] if isinstance(called[-1], tuple) else called[-1]
    if isinstance(y, Tensor) and y.ndim == 3 and len(y) == len(sequences) and not hasattr(y, "full_tensor"):
        trace.see(f"the output of {name}", sequences, y)
        if y.requires_grad:
            gradient = f"the gradient of the output of {name}"
            y.register_hook(lambda grad: trace.see(gradient, sequences, grad * len(sequences)))  # the loss is a mean


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _run_whole(task: _Task) -> None:
    trace = Trace()
    torch.save((_run(task, range(_SEQUENCES), trace), trace.tensors), task.folder / "whole.pt")


def _run_divided(task: _Task) -> tuple[str, str]:
    every = RANKS if "fsdp_size" in DIVISIONS[task.division] else 1
    sequences = range(dist.get_rank() if every > 1 else 0, _SEQUENCES, every)
    expected, tensors = torch.load(task.folder / "whole.pt", weights_only=False)
    trace = Trace(tensors, OTHER_ROWS.tokens)
    return find_difference(_run(task, sequences, trace), expected, OTHER_ROWS, lambda: trace)
