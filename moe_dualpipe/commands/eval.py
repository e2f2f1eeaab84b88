"""`moe-dualpipe eval`: the perplexity of a model on given text, or its results in tasks of lm-evaluation-harness."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..command_line import Mark, Positional
from ..data import read_stream
from ..data.chats import ChatOptions, ChatTemplate, template_file
from ..inference.scoring import perplexity
from ..inference.spread import open_spread
from ..messages import check_range, printable
from ..runtime.world import current_launch, join_world
from .options import JsonOption, check_ranges
from .spread_options import SpreadOptions


@dataclass(frozen=True)
class Eval(SpreadOptions, JsonOption):
    """Evaluate a model: its perplexity on text (--data), or tasks of lm-evaluation-harness (--tasks).

    With torchrun, the experts are spread over the processes, and each scores a part of the text.
    """

    model: Positional[Annotated[str, Mark("RUN")]]
    """Folder or URL of a run (its newest checkpoint is used), or of a checkpoint.
    Or a published model in Hugging Face's format."""
    data: str | None = None
    """Text: a file, a folder, a glob, a table (.jsonl, .csv, .parquet), or "stdlib". Of chats, the assistant's tokens.
    Or token ids: a .bin file, or the held-out text of a folder written by `moe-dualpipe data prepare`."""
    data_field: str = "text"
    """Field of a JSON object, or column of a table, that holds the text."""
    special_tokens: bool = False
    """Encode special tokens in the text, such as <|im_start|> in a chat, as one id. Otherwise, as characters."""
    chat_template: Path | None = None
    """File with the chat template for rows with chats. None: that of the model."""
    data_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Integer type of a .bin file without a description file (little-endian)."""
    seq_len: int = 256
    """Maximum number of tokens that the model attends to. Use the --seq-len of training."""
    stride: int | None = None
    """Tokens between the starts of windows. None: --seq-len.
    A stride below --seq-len gives tokens more context, and takes longer."""
    max_tokens: int | None = None
    """Evaluate only the start of the text. None: all of it."""
    tasks: Annotated[tuple[str, ...], Mark("TASK [TASK ...]")] = ()
    """Names of tasks of lm-evaluation-harness, which must be installed."""
    include_path: str | None = None
    """Folder with more tasks, as YAML files."""
    num_fewshot: int | None = None
    """Number of examples in the prompts of the tasks. None: the task's own."""
    limit: int | None = None
    """Number of examples of each task. None: all."""
    batch_size: int = 8
    """Number of sequences in a batch of a process."""

    def run(self) -> None:
        stride = self.seq_len if self.stride is None else self.stride
        check_ranges(self, 1, "seq_len", "batch_size", "stride", "max_tokens")
        check_range("--stride", stride, 1, self.seq_len, hint="; a longer one would leave out tokens")
        if (self.data is None) == (not self.tasks):
            raise ValueError("eval needs --data, the text to evaluate, or --tasks: give one of them")
        self.check_spread()
        if self.data is None:
            if current_launch().world_size > 1:
                raise ValueError("--tasks is for one process: start without torchrun")
            from ..integrations.lm_eval import MoEDualPipe, evaluate, results_table  # needs lm_eval

            model = MoEDualPipe(self.model, self.seq_len, self.batch_size, self.device, self.own_layers())
            with join_world(self.device):  # a layer may communicate
                found = evaluate(model, self.tasks, self.include_path, self.num_fewshot, self.limit)
            self.show(found["results"], results_table(found))
            return
        with self.joined() as world:
            sizes = self.batch_size, self.seq_len
            model, tokenizer, ranks = open_spread(
                self.model, self.own_layers(), world, *sizes, ep_backend=self.ep_backend
            )
            chats = ChatOptions(ChatTemplate.find({**model.companions, **template_file(self.chat_template)}, tokenizer))
            options = self.data_field, self.data_dtype, self.special_tokens, chats
            tokens, flags = read_stream(self.data, tokenizer, *options)
            if self.max_tokens and len(tokens) > self.max_tokens + 1:
                tokens, flags = (None if one is None else one[: self.max_tokens + 1] for one in (tokens, flags))
            assert tokens is not None
            found = perplexity(model, tokenizer, tokens, self.seq_len, stride, self.batch_size, ranks, flags)
        if world.rank:
            return
        self.show(asdict(found), f"{printable(self.model)}: {found}")
