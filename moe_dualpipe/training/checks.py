"""The valid values of options, for the command line and for programs that build a TrainConfig themselves."""

from operator import attrgetter

from ..integrations.trackers import check_installed
from ..messages import LARGEST, check_range, unknown_name
from ..runtime.learning_rate import decay_steps
from .config import TrainConfig
from .options import all_keys, option_name

# Options, with their smallest and largest valid values. None is always valid where the type allows it.
RANGES: tuple[tuple[str, float, float], ...] = (
    ("steps parallel.ep parallel.pp parallel.nodes_per_domain parallel.num_chunks parallel.max_deferred "
     "parallel.move_experts_every "
     "batch.seq_len batch.micro_batch_size batch.batch_size checkpoint.save_every checkpoint.keep "
     "metrics.eval_sequences metrics.log_every metrics.eval_every health.max_skipped health.check_replicas_every "
     "optim.decay_steps", 1, LARGEST),
    ("metrics.profile optim.warmup_steps", 0, LARGEST),
    ("sample.sample_tokens", 0, 1_000_000),
    ("seed", -(2**63), 2**63 - 1),
    ("bias_rate optim.final_lr parallel.move_experts_gain", 0, 1),
    ("health.timeout", 1, 1_000_000),
    ("metrics.peak_tflops optim.clip", 1e-6, 1e6),
    ("optim.lr", 1e-12, 100.0),
    ("optim.weight_decay", 0, 1000),
    ("optim.beta1 optim.beta2 optim.momentum", 0, 0.999999),  # a moment with 1 never changes
)  # fmt: skip


def check_options(config: TrainConfig) -> None:
    """Raise ValueError for the first option that is invalid alone or with others."""
    for options, low, high in RANGES:
        for option in options.split():
            if (value := attrgetter(option)(config)) is not None:
                check_range(option_name(option), value, low, high)
    for key in all_keys().values():
        value = attrgetter(key.name)(config)
        if key.choices and value is not None and not key.accepts(value):
            raise unknown_name(option_name(key.name), str(value), key.choices)
    if isinstance(config.freeze, str):
        raise ValueError(f"--freeze must be a tuple of patterns: got {config.freeze!r}")
    config.sample.sampling()  # raises ValueError
    for applies, reason in _contradictions(config):
        if applies:
            raise ValueError(reason)
    if config.metrics.tensorboard:
        check_installed("metrics.tensorboard", "tensorboard")
    if config.metrics.wandb:
        check_installed("--wandb", "wandb")


def _contradictions(config: TrainConfig) -> tuple[tuple[object, str], ...]:
    """Whether options contradict each other, and what to say then."""
    optim, mtp_layers, seq_len, start = config.optim, config.model.mtp_layers, config.batch.seq_len, config.checkpoint
    decay, wsd = decay_steps(optim, config.steps), optim.schedule == "wsd"
    return (
        (config.parallel.move_experts_every and config.parallel.ep == 1,
         "parallel.move_experts_every needs --ep 2 or more: with --ep 1, each rank has all experts"),
        (start.weights and start.resume,
         "--weights starts a new run and --resume continues an old one: use one of them"),
        (start.weights_partial and not start.weights, "--weights-partial needs --weights, the folder to load from"),
        (optim.schedule == "cosine" and optim.decay_steps,
         f"optim.decay_steps {optim.decay_steps} is for --lr-schedule wsd: cosine decays in all steps"),
        (wsd and optim.warmup_steps + decay > config.steps,
         f"{optim.warmup_steps} warm-up and {decay} decay steps do not fit into --steps {config.steps}: "
         "use fewer --warmup-steps or optim.decay_steps"),
        (seq_len <= mtp_layers,
         f"model.mtp_layers {mtp_layers} needs --seq-len {mtp_layers + 1} or more: got {seq_len}"),
        (config.batch.document_mask and mtp_layers, f"--document-mask needs model.mtp_layers 0: got {mtp_layers}"),
    )  # fmt: skip
