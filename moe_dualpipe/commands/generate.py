"""`moe-dualpipe generate`: text from a run, a checkpoint or an exported folder.

Under torchrun, the experts are spread over the processes, and each process generates a part of the texts.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import torch

from ..checkpoint.routes import write_routes
from ..command_line import Mark, Positional
from ..data import Tokenizer
from ..data.chats import ChatTemplate, template_file
from ..data.files import make_folder
from ..data.strict_json import reading
from ..inference import Sampling, generate, printable_text
from ..inference.conversation import converse
from ..inference.generation import ExpertRanks, recorded_routes
from ..inference.spread import open_spread
from ..messages import Rule, check_range, printable, refuse, typed_text
from ..models import TransformerStage
from ..runtime.world import current_launch
from .data import refuse_url
from .options import check_ranges
from .spread_options import SpreadOptions


@dataclass(frozen=True)
class Generate(SpreadOptions):
    """Continue a prompt with the model of a run, which may still be training.

    With torchrun, the experts are spread over the processes.
    """

    run_or_checkpoint: Positional[Annotated[str, Mark("RUN")]]
    """Folder or URL of a run (its newest checkpoint is used), of a checkpoint, or of a published model."""
    prompt: str = "\n"
    """Start of the text."""
    chat: bool = False
    """Start a conversation in the terminal. /exit or Ctrl-D ends it, Ctrl-C ends an answer."""
    chat_template: Path | None = None
    """File with the chat template for --chat. None: that of the model."""
    prompts: Path | None = None
    """File with a prompt in each line, instead of --prompt."""
    sample_tokens: int = 200
    """Maximum number of new tokens. A text ends earlier at the end of a document, and at each `eos_token_id` of a
    published model."""
    num: int = 1
    """Number of texts for each prompt."""
    batch_size: int | None = None
    """Number of texts that a process generates at a time. None: all."""
    temperature: float = 0.8
    """Sampling temperature. Lower is more predictable; 0 is greedy decoding."""
    top_k: int | None = None
    """Sample from the k most likely tokens. None: no limit."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens with this total probability. 1: no limit."""
    seq_len: int = 256
    """Maximum number of tokens that the model attends to. Use the --seq-len of training."""
    seed: int = 0
    """Random seed. The same seed gives the same texts."""
    copies: int = 0
    """With torchrun: number of copies of experts in each layer. Those with the most tokens in training get them."""

    record_routes: Path | None = None
    """Write the experts of each token to this file (docs/training.md)."""

    def run(self) -> None:
        check_ranges(self, 1, "seq_len", "batch_size")
        check_ranges(self, 1, "num", high=1000)
        check_ranges(self, 0, "sample_tokens", "copies", high=1_000_000)
        check_range("--seed", self.seed, -(2**63), 2**63 - 1)
        sampling = Sampling(self.temperature, self.top_k or None, self.top_p)  # raises ValueError
        self.check_spread()
        several, record, typed = current_launch().world_size > 1, self.record_routes, self.prompt != Generate.prompt
        refuse((
            Rule(
                self.copies and not several, f"--copies {self.copies} needs several processes: start them with torchrun"
            ),
            Rule(record and several, "--record-routes is for one process: start without torchrun"),
            Rule(
                record and (self.batch_size or self.prompts),
                "--record-routes needs texts of one prompt in one batch: no --batch-size, no --prompts",
            ),
            Rule(self.prompts and typed, "--prompts stands for --prompt: use one of them"),
            Rule(
                self.chat and (several or self.prompts or record or self.num > 1),
                "--chat is for one process, without --prompts, --num and --record-routes",
            ),
            Rule(self.chat_template and not self.chat, "--chat-template is for a conversation: use --chat"),
            Rule(self.chat and typed, "--chat reads its messages from the terminal: leave out --prompt"),
        ))  # fmt: skip
        if record:
            refuse_url(str(record))
            make_folder(record.parent, f"--record-routes {printable(record.parent)}")
        if self.chat:
            self._converse(sampling)
            return
        given = [self.prompt] if self.prompts is None else _lines(self.prompts)
        starts = [typed_text(prompt) for prompt in given for _ in range(self.num)]
        if not all(starts):
            what = "--prompt is empty" if self.prompts is None else f"{printable(self.prompts)} has an empty line"
            raise ValueError(f"{what}: use at least one character for each prompt")
        with self.joined() as world:
            most = -(-len(starts) // world.size)
            sizes = min(self.batch_size or most, most), self.seq_len
            model, tokenizer, ranks = open_spread(
                self.run_or_checkpoint, self.own_layers(), world, *sizes, self.copies, self.ep_backend
            )
            texts = self._generate(model, tokenizer, sampling, starts, ranks)
        if world.rank:
            return
        for i, text in enumerate(texts, 1):
            if len(texts) > 1:
                print(f"--- {i} of {len(texts)}")
            print(printable_text(text))

    def _converse(self, sampling: Sampling) -> None:
        """Raises ValueError without a chat template."""
        with self.joined() as world:
            model, tokenizer, _ = open_spread(self.run_or_checkpoint, self.own_layers(), world, 1, self.seq_len)
            files = {**model.companions, **template_file(self.chat_template)}
            if (template := ChatTemplate.find(files, tokenizer)) is None:
                raise ValueError(f"{printable(self.run_or_checkpoint)} has no chat template: name one, --chat-template")
            converse(model, tokenizer, template, self.sample_tokens, self.seq_len, sampling, self.seed)

    def _generate(
        self, model: TransformerStage, tokenizer: Tokenizer, sampling: Sampling, starts: Sequence[str],
        ranks: ExpertRanks,
    ) -> list[str]:  # fmt: skip
        """All texts. Each rank generates a part of them."""
        stops, device = (tokenizer.end_id, *tokenizer.stop_ids), next(model.parameters()).device
        prompts = [tokenizer.encode(start) for start in starts]
        least = max(map(len, prompts)) + self.sample_tokens
        if self.record_routes and least > self.seq_len:
            raise ValueError(f"--record-routes needs --seq-len {least} or more, for the whole text: got {self.seq_len}")
        number = -(-len(prompts) // ranks.size)
        first = ranks.rank * number
        own = [torch.tensor(prompt, device=device) for prompt in prompts[first:][:number]]
        with recorded_routes(model, number) if self.record_routes else nullcontext({}) as routes:
            mine = generate(
                model, own, self.sample_tokens, self.seq_len, sampling.temperature, sampling.top_k, sampling.top_p,
                self.seed, stops, first, self.batch_size, ranks,
            ).tolist()  # fmt: skip
        if self.record_routes:
            found = {layer: (torch.arange(number), experts_NSK) for layer, experts_NSK in routes.items()}
            write_routes(self.record_routes, found, {"layers": sorted(routes)})
        texts = [tokens for of_rank in ranks.gather(mine) for tokens in of_rank]
        return [
            tokenizer.decode([*prompt, *takewhile(lambda token: token not in stops, text)])
            for prompt, text in zip(prompts, texts, strict=True)
        ]


def _lines(path: Path) -> list[str]:
    """The lines of a text file. Unlike `splitlines`, form feeds and U+2028 do not end a line."""
    with reading(path):
        return path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
