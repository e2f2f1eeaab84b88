"""The options of a training run, grouped by subject. A field is a key of run.toml, and its docstring the help text.

options.py lists the keys that are flags of train.py, and reads all of them from flags, `--set` and TOML files. None
means no limit, or a value that setup.py chooses from the other options.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ..checkpoint.load import start_model
from ..expert_parallel.options import EpBackend
from ..kernels.options import Fp8, Kernels, Products
from ..models import ModelConfig, preset
from ..models.config import LoRA, Recompute
from ..runtime.learning_rate import OptimizerConfig

if TYPE_CHECKING:
    from ..inference import Sampling

DEFAULT_PRESET = "tiny"
_OF_PRESET = cast(ModelConfig, None)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the work is divided over processes."""

    pp: int | None = None
    """Number of pipeline ranks. None: processes / the least common multiple of ep and cp."""
    ep: int = 1
    """Number of ranks that share the experts of a layer. Must divide the number of experts, and processes / pp."""
    cp: int = 1
    """Number of ranks that share each sequence. --seq-len must be a multiple of twice this number."""
    ep_backend: EpBackend = "auto"
    """Backend for the exchange of tokens (docs/expert_parallel.md). deepep needs the package deep_ep.
    auto: symmetric for GPUs of one machine with peer access, shared for CPU ranks of one machine, else all_to_all.
    copy_engine uses no multiprocessors, but sends whole buffers: for decoding. Training works, with more bytes.
    A resumed run may use another backend."""
    expert_sums: Literal["rank", "choice"] = "rank"
    """Order in which the outputs of a token's experts are added.
    rank: each rank first adds those of its own experts, and returns one row per token.
    choice: in the order of the router's choices. Sends more, but moving experts does not change results."""
    move_experts_every: int | None = None
    """Move experts between ranks every so many steps, to balance the measured loads. None: never."""
    move_experts_gain: float = 0.05
    """Move the experts of a layer only if the load of its busiest rank falls by at least this fraction."""
    nodes_per_domain: int | None = None
    """Number of machines in one NVLink domain; machines are sorted by name.
    Ranks that share experts are placed on one machine or, if they do not fit, in one domain.
    None: 1. On NVL72 racks, set the number of machines in a rack: 18."""
    schedule: str = "auto"
    """Pipeline schedule (docs/schedules.md), or a CSV file. auto: dualpipe for an even number of pipeline ranks, else
    dualpipev; 1f1b for one process. NAME+fill: moves weight gradients into idle time."""
    layers: str | None = None
    """Number of layers of each stage, such as 4,4,3,3. None: about the same FLOPs in each.
    auto: on a GPU that the planner knows, the fastest that fit into memory; elsewhere as None."""
    num_chunks: int | None = None
    """Stages per rank, for interleaved schedules. None: the schedule's default."""
    overlap: bool = True
    """Overlap the communication of one micro-batch with the computation of another, if the schedule pairs them."""
    wgrad: Literal["early", "late"] = "early"
    """When an overlapped pair computes the weight gradients of a layer's MLP: early, as DeepSeek, or late, after the
    other chunk's MLP. late is faster where attention is short or combine is long; the results are bit-identical."""
    max_deferred: int | None = None
    """Maximum number of chunks with deferred weight gradients; a limit saves activation memory. None: no limit."""
    zero: bool = True
    """Shard the optimizer state over the ranks that hold the same weights (ZeRO-1). Results are bit-identical."""


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """Device, dtype, kernels and memory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there is one for each process, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations. auto: bfloat16 on GPUs, float32 on CPUs.
    Master weights and gradients are always float32."""
    kernels: Kernels = "auto"
    """triton, or reference: plain torch. auto: triton on GPUs, reference on CPUs."""
    self_test: bool = True
    """Compare the Triton kernels with plain torch on a small problem at the start, and use plain torch if they differ.
    Once for each combination of GPU, versions and model sizes. With kernels=triton, a difference is an error."""
    products: Products = "auto"
    """Library for products of fp32 matrices on a CPU. auto: onednn on AMD CPUs from Zen 5 on, else mkl."""
    compile: Literal["auto", "on", "off", "whole"] = "auto"
    """on: fuse small operators with torch.compile. whole: compile each micro-batch as one function, for small models
    that wait for Python, in one process on a CPU. auto: on for GPUs, off for CPUs."""
    fp8: Fp8 = "off"
    """experts: the products of the experts multiply 8-bit numbers, except for weight gradients.
    experts+dispatch: rows are also sent to the experts in 8 bits."""
    fp8_recipe: Literal["ue8m0", "fp32", "mxfp8"] = "ue8m0"
    """ue8m0, fp32: scales for 128 numbers, as powers of two or in fp32. mxfp8: powers of two for 32 numbers."""
    cuda_graphs: bool = False
    """Launch each micro-batch as one CUDA graph. For small models on one GPU, which are limited by launch overhead."""
    recompute: Recompute = "none"
    """Activations to recompute in backward instead of saving.
    attention includes norms and router; full also includes the MLP."""
    fused_loss: bool = False
    """Compute head and loss in blocks of tokens, without storing all logits. For large vocabularies."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """The training data and the size of a step."""

    data: tuple[str, ...] = ("stdlib",)
    """Training data: one or more SOURCE or SOURCE=WEIGHT (docs/data.md).
    A source is a text file, a folder, a glob, a table (.jsonl, .csv, .parquet), a .bin file of token ids, hf:NAME, a
    folder written by `moe-dualpipe data prepare`, a URL of one of these, or stdlib: Python's standard library."""
    data_field: str = "text"
    """Field of a JSON object, or column of a table, that holds the text."""
    special_tokens: bool = False
    """Encode special tokens in the text, such as <|im_start|> in a chat, as one id. Otherwise, as characters."""
    chat_template: str | None = None
    """File with the chat template for rows of messages (docs/data.md). None: that of the model."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens of chats to train on: those that the assistant wrote, or all."""
    packing: bool = True
    """Put several chats into a sequence. They do not see each other."""
    too_long: Literal["error", "cut", "drop"] = "error"
    """What to do with a chat that is longer than --seq-len."""
    data_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Integer type of a .bin file without a .json file beside it; little-endian."""
    seq_len: int = 256
    """Tokens per sequence."""
    document_mask: bool = False
    """Restrict attention to tokens of the same document."""
    batch_size: int = 16
    """Sequences per step over all ranks. Step n reads the same sequences in every layout."""
    record_routes: str | None = None
    """Write the experts that are chosen for every token to this local folder (docs/training.md)."""
    replay_routes: str | None = None
    """Train with the experts in this folder or file, instead of those that the router chooses."""
    micro_batch_size: int | None = None
    """Sequences per micro-batch. None: 2, or 1 if the schedule needs more micro-batches; as a CSV file needs.
    In one process, None is the whole batch, if it has at most 16,384 tokens and fits into memory."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where a run is saved, and what it starts from."""

    out: str | None = None
    """Folder for checkpoints and metrics, or a URL (docs/checkpoints.md).
    None: the folder of the resumed run, or a new folder runs/<preset>[-2, -3 ...]."""
    resume: str | None = None
    """Resume from the newest checkpoint of this run, or from this checkpoint. A folder or a URL.
    Its options are restored; options given beside it override them."""
    weights: str | None = None
    """Start a new run from these weights: the folder or URL of a model in Hugging Face's format, of another run (its
    newest checkpoint is used), or of a checkpoint."""
    weights_partial: bool = False
    """With --weights: load only the weights that match by name and shape. Others keep their initial values."""
    save_every: int | None = None
    """Steps between checkpoints. None: save only at the end."""
    keep: int | None = 3
    """Number of checkpoints to keep. None: all."""
    export: str | None = None
    """At the end, write the model into this new folder or URL in Hugging Face's format (docs/checkpoints.md)."""
    save_async: bool = True
    """Continue training while a checkpoint is written. Needs host memory for a copy of weights and moments."""
    staging: str | None = None
    """Local folder for the files of runs, checkpoints and exports at a URL; those of --data go to TMPDIR.
    None: moe-dualpipe-<user id> in the system's temporary folder."""


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """What is measured and recorded."""

    log_every: int = 1
    """Steps per record in metrics.jsonl. A record has the mean loss and the speed of its steps.
    A checkpoint, a validation and the end of the run also end a record."""
    eval_every: int | None = None
    """Steps between validations. None: validate only before and after the run."""
    eval_sequences: int = 64
    """Held-out sequences for the validation loss, rounded up to whole batches."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard."""
    wandb: str | None = None
    """Also log the metrics to this Weights & Biases project."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device, for model FLOPs utilization (mfu). None: known for common GPUs."""
    profile: int = 0
    """Number of steps to profile on every rank, after two warm-up steps (docs/profiling.md)."""


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """The text that is generated at the end of a run."""

    sample_tokens: int = 160
    """Number of tokens to generate. 0: no sample."""
    prompt: str = "class "
    """Prompt for the text that is generated at the end of the run."""
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
    """Seconds to wait for another rank before the run fails. A rank that dies is detected sooner."""
    check_memory: bool = True
    """Refuse to start if a step does not fit into free memory."""
    max_skipped: int = 10
    """Stop after this many consecutive steps with a non-finite loss or gradient. Such steps are skipped.
    A run in which all steps were skipped also ends with an error."""
    check_replicas_every: int | None = 1
    """Steps between checks that replicas are bit-equal, before the update (docs/reliability.md).
    None: check only at the start, before each checkpoint, and at the end."""
    traceback: bool = False
    """Print the full traceback of an error in a custom layer, instead of one line with file and line number."""


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
    """Parameters to exclude from training, by their names in checkpoints; * matches any text (docs/training.md).
    Example: --freeze embedding.weight 'layers.*.experts.*'"""

    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    batch: BatchConfig = BatchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    sample: SampleConfig = SampleConfig()
    health: HealthConfig = HealthConfig()
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRA = field(default_factory=LoRA)
    model: ModelConfig = _OF_PRESET

    def __post_init__(self) -> None:
        if self.model is _OF_PRESET:
            start = self.checkpoint
            model = start_model(start.resume, start.weights) if self.preset is None else None
            object.__setattr__(self, "model", model or preset(self.preset or DEFAULT_PRESET))

    @property
    def name(self) -> str:
        """The name of the model and of a new run: the preset, or the folder of the weights or of the resumed run."""
        folder = Path(self.checkpoint.weights or self.checkpoint.resume or "")
        parts = [part for part in folder.parts if part != "checkpoints" and not part.startswith("step-")]
        return self.preset or (re.sub(r"[^\w.-]", "-", parts[-1])[:60] if parts else DEFAULT_PRESET)
