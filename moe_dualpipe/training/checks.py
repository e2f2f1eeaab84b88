"""The values that options may have. Programs that build a TrainConfig themselves are checked by the same rules."""

import dataclasses
from collections.abc import Callable
from math import inf
from typing import Any

from .config import TrainConfig
from .learning_rate import decay_steps
from .metrics import check_tensorboard

# Flags, test, requirement. None is always valid where the type allows it.
RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("steps ep pp num-chunks max-deferred seq-len micro-batch-size micro-batches save-every keep eval-sequences "
     "max-skipped check-replicas-every top-k optim.decay-steps", lambda x: x >= 1, "at least 1"),
    ("sample-tokens profile bias-rate optim.warmup-steps optim.weight-decay", lambda x: 0 <= x < inf,
     "finite and not negative"),
    ("timeout peak-tflops optim.lr optim.clip", lambda x: 0 < x < inf, "positive and finite"),
    ("optim.final-lr", lambda x: 0 <= x <= 1, "from 0 to 1"),
    ("optim.beta1 optim.beta2 optim.momentum", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("dtype", ("float32", "bfloat16", "auto").__contains__, "float32, bfloat16 or auto"),
    ("optim.name", ("adamw", "muon").__contains__, "adamw or muon"),
    ("optim.schedule", ("cosine", "wsd").__contains__, "cosine or wsd"),
)  # fmt: skip


def check_options(config: TrainConfig) -> None:
    """Raise ValueError, with the value and the requirement, for the first option that is invalid on its own or with
    others."""
    values = option_values(config)
    for flags, valid, requirement in RULES:
        for flag in flags.split():
            if values[flag] is not None and not valid(values[flag]):
                got = repr(values[flag]) if isinstance(values[flag], str) else values[flag]
                raise ValueError(f"--{flag} must be {requirement}: got {got}")
    config.sample.sampling()  # for its errors
    optim, mtp_layers, seq_len = config.optim, config.model.mtp_layers, config.batch.seq_len
    if config.checkpoint.weights and config.checkpoint.resume:
        raise ValueError("--weights starts a new run and --resume continues an old one: use one of them")
    if config.metrics.tensorboard:
        check_tensorboard()
    if optim.schedule == "cosine" and optim.decay_steps:
        raise ValueError(
            f"--optim.decay-steps {optim.decay_steps} is for --optim.schedule wsd: cosine decays in all steps"
        )
    decay = decay_steps(optim, config.steps)
    if optim.schedule == "wsd" and optim.warmup_steps + decay > config.steps:
        raise ValueError(
            f"{optim.warmup_steps} warm-up and {decay} decay steps do not fit into --steps {config.steps}: "
            "use fewer --optim.warmup-steps or --optim.decay-steps"
        )
    if seq_len <= mtp_layers:
        raise ValueError(f"--model.mtp-layers {mtp_layers} needs --seq-len {mtp_layers + 1} or more: got {seq_len}")
    if config.batch.document_mask and mtp_layers:
        raise ValueError(
            f"--document-mask does not support multi-token prediction: use --model.mtp-layers 0: got {mtp_layers}"
        )


def option_values(config: TrainConfig) -> dict[str, Any]:
    """The value of every option, by its flag without the dashes."""
    values = {}
    for name, value in _fields(config):
        prefix = f"{name}." if name in ("optim", "model") else ""
        for inner, inner_value in _fields(value) if dataclasses.is_dataclass(value) else [("", value)]:
            values[(f"{prefix}{inner}" if inner else name).replace("_", "-")] = inner_value
    return values


def _fields(config: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
