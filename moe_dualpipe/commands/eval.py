"""`moe-dualpipe eval`: the perplexity of a model on given text, or its results in tasks of lm-evaluation-harness."""

import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from ..data import strict_json
from ..data.stores import block_cache, is_url
from ..messages import check_range, printable
from .own_layers import NO_OWN_LAYERS, OwnLayers

CACHE_BYTES = 20 * 10**9
"""Largest size of the local copies of token ids at a URL."""

if TYPE_CHECKING:
    from ..data import Tokenizer
    from ..inference.scoring import Tokens
    from ..models import TransformerStage


@dataclass(frozen=True, slots=True)
class Perplexity:
    """What `eval` reports. loss: in nats per token. tokens: number of scored tokens. bytes: of their text."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    """None if the tokenizer is unknown."""
    tokens: int
    bytes: int | None
    seq_len: int
    stride: int
    tokens_per_second: float

    def __str__(self) -> str:
        lines = [f"loss {self.loss:.4f} nats per token", f"perplexity {self.perplexity:,.3f}"]
        if self.bits_per_byte is not None:
            lines.append(f"{self.bits_per_byte:.4f} bits per byte")
        window = f"{self.tokens:,} tokens in windows of {self.seq_len}"
        if self.stride < self.seq_len:
            window += f", every {self.stride}"
        return "\n".join([*lines, f"{window}; {self.tokens_per_second:,.0f} tokens/s"])


@dataclass(frozen=True)
class Eval:
    """Evaluate a model: its perplexity on text (--data), or tasks of lm-evaluation-harness (--tasks)."""

    model: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or URL of a run (its newest checkpoint is used), or of a checkpoint.
    Or a folder from `moe-dualpipe export`, or a published model in Hugging Face's format."""
    data: str | None = None
    """Text: a file, a folder, a glob, a .jsonl file, or "stdlib".
    Or token ids: a .bin file, or the held-out text of a folder written by `moe-dualpipe data prepare`."""
    data_field: str = "text"
    """Field of a .jsonl line that holds the text."""
    data_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Integer type of a .bin file without a description file (little-endian)."""
    seq_len: int = 256
    """Maximum number of tokens that the model attends to. Use the --seq-len of training."""
    stride: int | None = None
    """Tokens between the starts of windows. None: --seq-len.
    A stride below --seq-len gives tokens more context, and takes longer."""
    max_tokens: int | None = None
    """Evaluate only the start of the text. None: all of it."""
    tasks: Annotated[tuple[str, ...], arg(metavar="TASK [TASK ...]")] = ()
    """Names of tasks of lm-evaluation-harness, which must be installed."""
    include_path: str | None = None
    """Folder with more tasks, as YAML files."""
    num_fewshot: int | None = None
    """Number of examples in the prompts of the tasks. None: the task's own."""
    limit: int | None = None
    """Number of examples of each task. None: all."""
    batch_size: int = 8
    """Number of sequences in a batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu, cuda (in bfloat16), or auto: cuda if there is a GPU, otherwise cpu."""
    layers: OmitArgPrefixes[OwnLayers] = NO_OWN_LAYERS
    json: bool = False
    """Print JSON instead."""
    traceback: bool = False
    """Print the whole traceback of an error in your own layer, instead of one line with its file and line number."""

    def run(self) -> None:
        check_range("--seq-len", self.seq_len, 1)
        check_range("--batch-size", self.batch_size, 1)
        stride = self.seq_len if self.stride is None else self.stride
        check_range("--stride", stride, 1)
        check_range("--stride", stride, 1, self.seq_len, hint="; a longer one would leave out tokens")
        if self.max_tokens is not None:
            check_range("--max-tokens", self.max_tokens, 1)
        if (self.data is None) == (not self.tasks):
            raise ValueError("eval needs --data, the text to evaluate, or --tasks: give one of them")
        if self.tasks:
            self._run_tasks()
            return

        from ..checkpoint import open_model
        from ..data import read_stream

        model, tokenizer = open_model(self.model, self.layers.named(), self.device)
        cache = block_cache(None, CACHE_BYTES) if is_url(self.data) else None
        tokens: Any = read_stream(self.data or "", tokenizer, self.data_field, self.data_dtype, cache)
        if self.max_tokens and len(tokens) > self.max_tokens + 1:
            tokens = tokens[: self.max_tokens + 1]
        found = perplexity(model, tokenizer, tokens, self.seq_len, stride, self.batch_size)
        print(strict_json.write(asdict(found), indent=2) if self.json else f"{printable(self.model)}: {found}")

    def _run_tasks(self) -> None:
        from ..integrations.lm_eval import MoEDualPipe, evaluate, results_table

        model = MoEDualPipe(self.model, self.seq_len, self.batch_size, self.device, self.layers.named())
        found = evaluate(model, self.tasks, self.include_path, self.num_fewshot, self.limit)
        print(strict_json.write(found["results"], indent=2) if self.json else results_table(found))


def perplexity(
    model: "TransformerStage", tokenizer: "Tokenizer", tokens: "Tokens", seq_len: int, stride: int, batch_size: int
) -> Perplexity:
    """The perplexity of a model on a text of token ids. All tokens but the first are scored."""
    from tqdm import tqdm

    from ..data import UnknownTokenizer, num_bytes
    from ..inference import stream_losses

    total, scored, started = 0.0, 0, time.perf_counter()
    with tqdm(total=len(tokens) - 1, unit=" tokens", leave=False, disable=None) as bar:
        for losses_N in stream_losses(model, tokens, seq_len, stride, batch_size):
            total += losses_N.double().sum().item()
            scored += len(losses_N)
            bar.update(len(losses_N))
    seconds, loss = time.perf_counter() - started, total / scored
    size = None if isinstance(tokenizer, UnknownTokenizer) else num_bytes(tokenizer, tokens[1:])
    return Perplexity(
        loss, math.exp(loss) if loss < 700 else math.inf, total / math.log(2) / size if size else None, scored, size,
        seq_len, stride, round(scored / seconds, 1),
    )  # fmt: skip
