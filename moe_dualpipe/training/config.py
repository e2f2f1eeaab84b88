"""The options of a training run, grouped by subject. A field is a key of run.toml, and its docstring the help text.

options.py lists the keys that are flags of train.py, and reads all of them from flags, `--set` and TOML files. None
means no limit, or a value that setup.py chooses from the others.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ..expert_parallel.options import EpBackend
from ..kernels.options import Kernels
from ..models import ModelConfig, preset
from ..models.config import Recompute
from .start_model import start_model

if TYPE_CHECKING:
    from ..inference import Sampling

DEFAULT_PRESET = "tiny"
_OF_PRESET = cast(ModelConfig, None)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the work is divided over processes: pipeline x data-parallel ranks."""

    pp: int | None = None
    """Pipeline ranks. None: processes / ep."""
    ep: int = 1
    """Number of ranks that share the experts of a layer; divides the experts and the data-parallel ranks."""
    ep_backend: EpBackend = "auto"
    """How these ranks exchange tokens (docs/expert_parallel.md). deepep needs the package deep_ep.
    auto: symmetric for GPUs of one machine that access each other's memory, shared for its CPU ranks, else all_to_all.
    A resumed run may use another."""
    expert_sums: Literal["rank", "choice"] = "rank"
    """Order of the sum of a token's experts.
    rank: each rank adds up its own first, so a token returns once from each rank.
    choice: in the order of the router's choices, which sends more; then moving experts changes no bit."""
    place_experts: str | None = None
    """Which rank holds which expert at first: a file from `moe-dualpipe model balance --json`.
    auto: by the loads in the checkpoint of --resume. None: in the order of their ids."""
    move_experts_every: int | None = None
    """Steps between decisions to move experts to other ranks, by the loads since the last one. None: never."""
    move_experts_gain: float = 0.05
    """Move the experts of a layer only if the load of its fullest rank falls by this fraction or more."""
    nodes_per_domain: int | None = None
    """Number of machines joined by NVLink, next to each other in the order of their names.
    Ranks that share experts are placed on one machine or, if they do not fit, in one such domain.
    None: a block of Slurm's topology, or 1."""
    schedule: str = "auto"
    """Pipeline schedule (docs/schedules.md). auto: dualpipe for an even number of pipeline ranks, else dualpipev."""
    num_chunks: int | None = None
    """Stages per rank, for schedules that allow a choice (interleaved_1f1b). None: the schedule's default."""
    overlap: bool = True
    """Run the communication of one micro-batch during the computation of another, where the schedule pairs them."""
    max_deferred: int | None = None
    """Maximum number of chunks with deferred weight gradients; a limit saves activation memory. None: no limit."""
    zero: bool = True
    """Divide the optimizer state among the ranks that hold the same weights (ZeRO-1). Results are bit-identical."""


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """Devices, number format, kernels and memory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu, cuda, or auto: GPUs if there is one for each process, else CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """float32, bfloat16, or auto: bfloat16 on GPUs. Master weights and gradients are always float32."""
    kernels: Kernels = "auto"
    """triton, reference (plain torch), or auto: Triton on GPUs."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Fuse norms, rotations, activations and sums with torch.compile. auto: on for GPUs, and for long runs on CPUs."""
    cuda_graphs: bool = False
    """Launch each micro-batch as one CUDA graph. For small models on one GPU, which wait for the host."""
    recompute: Recompute = "none"
    """What to recompute in backward instead of saving it. attention includes norms and router; full also the MLP."""
    fused_loss: bool = False
    """Compute head and loss together in blocks of tokens, without storing all logits. For large vocabularies."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """The training data and the size of a step."""

    data: tuple[str, ...] = ("stdlib",)
    """Training data: one or more SOURCE or SOURCE=WEIGHT (docs/training.md).
    A source is a text file, a folder, a glob, a .jsonl file, a .bin file of token ids, or a URL of one of these.
    Or a folder written by `moe-dualpipe data prepare`, or "stdlib": the source code of Python's standard library."""
    data_field: str = "text"
    """Field of a .jsonl line that holds the text."""
    data_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Integer type of a .bin file without a description file (little-endian)."""
    data_cache: str | None = None
    """Local folder for blocks of token ids that are read from a URL. None: data-cache in checkpoint.staging."""
    data_cache_gb: float = 20.0
    """Largest size of this folder in GB."""
    seq_len: int = 256
    """Tokens per sequence."""
    document_mask: bool = False
    """Restrict attention to tokens of the same document."""
    batch_size: int = 16
    """Sequences per step, over all ranks. Step n reads the same ones in every layout."""
    micro_batch_size: int | None = None
    """Sequences per micro-batch. None: 2, or 1 if the schedule needs more micro-batches."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where a run is saved, and what it starts from."""

    out: str | None = None
    """Folder for checkpoints and metrics, or a URL (docs/storage.md).
    None: that of the resumed run, or a new folder runs/<preset>[-2, -3 ...]."""
    resume: str | None = None
    """Resume from the newest checkpoint of this run, or from this checkpoint. A folder or a URL."""
    weights: str | None = None
    """Start a new run from the weights in this folder or URL.
    It has a published model in Hugging Face's format, or what `moe-dualpipe export` wrote."""
    weights_partial: bool = False
    """With --weights: load the weights that fit the model by name and shape. Others keep their initial values."""
    save_every: int | None = None
    """Steps between checkpoints. None: save only at the end."""
    keep: int | None = 3
    """Number of checkpoints to keep. None: all."""
    export: str | None = None
    """At the end, write the model into this new folder or URL in Hugging Face's format (docs/checkpoints.md)."""
    save_async: bool = True
    """Continue training while a checkpoint is written. Needs main memory for a copy of weights and moments."""
    staging: str | None = None
    """Local folder for files on their way to or from a URL.
    None: moe-dualpipe-<user id> in the folder for temporary files."""


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """What is measured and recorded."""

    log_every: int = 1
    """Number of steps per record of the metrics. A record has the mean loss and the speed of these steps.
    A record also ends at a checkpoint, at a validation, and at the end of the run."""
    eval_every: int | None = None
    """Steps between validations. They do not change training. None: validate only before and after the run."""
    eval_sequences: int = 64
    """Number of held-out sequences for the validation loss, rounded up to whole batches."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard."""
    wandb: str | None = None
    """Also log the metrics to this Weights & Biases (W&B) project."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device, for the metric mfu (model FLOPs utilization). None: known for common GPUs."""
    profile: int = 0
    """Number of steps to profile on every rank, after two warm-up steps (docs/profiling.md)."""


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """The text that is generated at the end of a run."""

    sample_tokens: int = 160
    """Number of tokens to generate. 0: no sample."""
    prompt: str = "class "
    """Text that the sample continues."""
    temperature: float = 0.8
    """Sampling temperature. Lower is more predictable; 0 is greedy decoding."""
    top_k: int | None = None
    """Sample from the k most likely tokens. None: no limit."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this total probability. 1: no limit."""

    def sampling(self) -> "Sampling":
        """Raises ValueError for values out of range."""
        from ..inference import Sampling  # imports torch, which --help does not need

        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """When a run stops because something is wrong."""

    timeout: float = 600.0
    """Seconds that a rank waits for another one before the run fails. A rank that dies is detected sooner.
    After a quarter of this time, the run prints who waits for whom."""
    check_memory: bool = True
    """Refuse to start if weights, gradients and optimizer state do not fit into the memory that is free."""
    max_skipped: int = 10
    """Stop after this many consecutive steps with a non-finite loss or gradient. Such steps are skipped."""
    check_replicas_every: int | None = 1
    """Steps between checks that replicas are bit-equal, before the update (docs/reliability.md).
    None: check only at the start, before each checkpoint, and at the end."""
    traceback: bool = False
    """Print the whole traceback of an error in your own layer, instead of one line with its file and line number."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Optimizer and learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the matrices inside the blocks, AdamW for all other parameters."""
    lr: float = 3e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up. cosine: cosine decay; wsd: constant, then 1 - sqrt decay over decay_steps."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_steps: int | None = None
    """wsd: steps of the decay at the end. None: a fifth of all steps."""
    final_lr: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    beta1: float = 0.9
    """adamw: decay rate of the first moment."""
    beta2: float = 0.95
    """adamw: decay rate of the second moment."""
    momentum: float = 0.95
    """muon: decay rate of the momentum."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: float | None = 1.0
    """Maximum gradient norm over all ranks; larger gradients are scaled down. None: no limit."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a Mixture-of-Experts transformer with pipeline parallelism.

    $ python train.py                                one process
    $ torchrun --nproc-per-node 2 train.py           two pipeline ranks, DualPipe
    $ torchrun --nproc-per-node 4 train.py --ep 2    experts spread over two ranks
    $ moe-dualpipe train                             the same as train.py
    $ moe-dualpipe --version
    """

    preset: str | None = None
    """Model size; keys such as model.num_layers override single values.
    None: the model of --resume or --weights, or tiny."""
    steps: int = 320
    """Total number of optimizer steps, including those before a resume."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    bias_rate: float = 3e-3
    """Change of a router's biases per step (model.router_bias); use less for long runs. 0: biases do not change."""
    freeze: tuple[str, ...] = ()
    """Parameters to exclude from training: their names in checkpoints, with * for any text (docs/training.md).
    Example: --freeze embedding.weight 'layers.*.experts.*'"""

    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    batch: BatchConfig = BatchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    sample: SampleConfig = SampleConfig()
    health: HealthConfig = HealthConfig()
    optim: OptimizerConfig = OptimizerConfig()
    model: ModelConfig = _OF_PRESET

    def __post_init__(self) -> None:
        if self.model is _OF_PRESET:
            start = self.checkpoint
            model = start_model(start.resume, start.weights, start.staging) if self.preset is None else None
            object.__setattr__(self, "model", model or preset(self.preset or DEFAULT_PRESET))

    @property
    def name(self) -> str:
        """The name of the model and of a new run: the preset, or the folder of the weights or of the resumed run."""
        folder = Path(self.checkpoint.weights or self.checkpoint.resume or "")
        parts = [part for part in folder.parts if part != "checkpoints" and not part.startswith("step-")]
        return self.preset or (re.sub(r"[^\w.-]", "-", parts[-1])[:60] if parts else DEFAULT_PRESET)
