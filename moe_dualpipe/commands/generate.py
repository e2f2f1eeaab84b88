"""`moe-dualpipe generate`: text from a run, a checkpoint or an exported folder.

Under torchrun, the experts are spread over the processes, and each process generates a part of the texts.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from tyro.conf import Positional, arg

from ..checkpoint import open_model
from ..checkpoint.routes import write_routes
from ..data import Tokenizer
from ..inference import Sampling, generate, printable_text
from ..inference.generation import recorded_routes
from ..inference.spread import open_spread
from ..messages import check_range, typed_text
from ..models import TransformerStage
from ..runtime.shared_errors import gather_objects
from ..runtime.world import current_launch, join_world
from .options import DeviceOption, OwnLayerOptions, check_ranges


@dataclass(frozen=True)
class Generate(OwnLayerOptions, DeviceOption):
    """Continue a prompt with the model of a run, which may still be training.

    With torchrun, the experts are spread over the processes.
    """

    run_or_checkpoint: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or URL of a run (its newest checkpoint is used), of a checkpoint, or of a published model."""
    prompt: str = "\n"
    """Start of the text."""
    sample_tokens: int = 200
    """Maximum number of new tokens. A text ends earlier if the model ends the document."""
    num: int = 1
    """Number of texts, generated as one batch."""
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
        check_ranges(self, 1, "seq_len")
        check_ranges(self, 1, "num", high=1000)
        check_ranges(self, 0, "sample_tokens", "copies", high=1_000_000)
        check_range("--seed", self.seed, -(2**63), 2**63 - 1)
        sampling = Sampling(self.temperature, self.top_k or None, self.top_p)  # raises ValueError
        if self.copies and current_launch().world_size == 1:
            raise ValueError(f"--copies {self.copies} needs several processes: start them with torchrun")
        if self.record_routes and current_launch().world_size > 1:
            raise ValueError("--record-routes is for one process: start without torchrun")
        with join_world(self.device) as world:  # also of one process: a layer may communicate
            if world.size > 1:
                tokens = -(-self.num // world.size) * max(self.seq_len, len(typed_text(self.prompt).encode()))
                model, tokenizer = open_spread(self.run_or_checkpoint, self.own_layers(), world, self.copies, tokens)
            else:
                model, tokenizer = open_model(self.run_or_checkpoint, self.own_layers(), self.device)
            texts = self._generate(model, tokenizer, sampling, world.rank, world.size)
        if world.rank:
            return
        for i, text in enumerate(texts, 1):
            if self.num > 1:
                print(f"--- {i} of {self.num}")
            print(printable_text(text))

    def _generate(
        self, model: TransformerStage, tokenizer: Tokenizer, sampling: Sampling, rank: int, ranks: int
    ) -> list[str]:
        """All texts. Each rank generates the same number of them, so there may be more than needed."""
        end, prompt = tokenizer.end_id, tokenizer.encode(typed_text(self.prompt))
        if not prompt:
            raise ValueError("--prompt is empty: use at least one character, or leave it out")
        number = -(-self.num // ranks)
        prompts = torch.tensor([prompt] * number, device=next(model.parameters()).device)
        if self.record_routes and (least := len(prompt) + self.sample_tokens) > self.seq_len:
            raise ValueError(f"--record-routes needs --seq-len {least} or more, for the whole text: got {self.seq_len}")
        with recorded_routes(model, number) if self.record_routes else nullcontext({}) as routes:
            mine = generate(
                model, prompts, self.sample_tokens, self.seq_len, sampling.temperature, sampling.top_k, sampling.top_p,
                self.seed, end, (rank * number, self.num),
            ).tolist()  # fmt: skip
        if self.record_routes:
            samples_N = torch.arange(number)
            write_routes(self.record_routes, {layer: (samples_N, found) for layer, found in routes.items()})
        of_ranks = gather_objects(mine) if ranks > 1 else [mine]
        texts = [tokens for of_rank in of_ranks for tokens in of_rank][: self.num]
        return [tokenizer.decode(prompt + t[: t.index(end) if end in t else None]) for t in texts]
