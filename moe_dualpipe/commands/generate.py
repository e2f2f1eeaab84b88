"""`moe-dualpipe generate`: text from a run, a checkpoint or an exported folder.

Under torchrun, the experts are spread over the processes, and each process generates a part of the texts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from ..messages import check_range
from .own_layers import NO_OWN_LAYERS, OwnLayers

if TYPE_CHECKING:
    from ..data import Tokenizer
    from ..inference import Sampling
    from ..models import TransformerStage


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with the model of a run, which may still be training.

    With torchrun, the experts are spread over the processes.
    """

    run_or_checkpoint: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or URL of a run (its newest checkpoint is used), of a checkpoint, or from `moe-dualpipe export`."""
    prompt: str = "\n"
    """Start of the text."""
    tokens: int = 200
    """Maximum number of new tokens. A text ends earlier if the model ends the document."""
    num: int = 1
    """Number of texts, generated as one batch."""
    temperature: float = 0.8
    """Sampling temperature. Lower is more predictable; 0 is greedy decoding."""
    top_k: int | None = None
    """Sample from the k most likely tokens. None: no limit."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens with this total probability. 1: no limit."""
    max_length: int = 256
    """Maximum number of tokens that the model attends to. Use the --seq-len of training."""
    seed: int = 0
    """Random seed. The same seed gives the same texts."""
    copies: int = 0
    """With torchrun: number of copies of experts in each layer. Those with the most tokens in training get them."""
    layers: OmitArgPrefixes[OwnLayers] = NO_OWN_LAYERS
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu, cuda (in bfloat16), or auto: cuda if there is a GPU, otherwise cpu."""
    traceback: bool = False
    """Print the whole traceback of an error in your own layer, instead of one line with its file and line number."""

    def run(self) -> None:
        from ..checkpoint import open_model
        from ..inference import Sampling, printable_text
        from ..runtime.world import current_launch, join_world

        check_range("--num", self.num, 1, 1000)
        check_range("--tokens", self.tokens, 0, 1_000_000)
        check_range("--max-length", self.max_length, 1)
        check_range("--seed", self.seed, -(2**63), 2**63 - 1)
        check_range("--copies", self.copies, 0)
        sampling = Sampling(self.temperature, self.top_k or None, self.top_p)  # raises ValueError
        if current_launch().world_size > 1:
            from ..inference.spread import open_spread

            with join_world(self.device) as world:
                tokens = -(-self.num // world.size) * max(self.max_length, len(self.prompt.encode()))
                model, tokenizer = open_spread(self.run_or_checkpoint, self.layers.named(), world, self.copies, tokens)
                texts = self._generate(model, tokenizer, sampling, world.rank, world.size)
            if world.rank:
                return
        elif self.copies:
            raise ValueError(f"--copies {self.copies} needs several processes: start them with torchrun")
        else:
            model, tokenizer = open_model(self.run_or_checkpoint, self.layers.named(), self.device)
            texts = self._generate(model, tokenizer, sampling)
        for i, text in enumerate(texts, 1):
            if self.num > 1:
                print(f"--- {i} of {self.num}")
            print(printable_text(text))

    def _generate(
        self, model: "TransformerStage", tokenizer: "Tokenizer", sampling: "Sampling", rank: int = 0, ranks: int = 1
    ) -> list[str]:
        """All texts. Each rank generates the same number of them, so there may be more than needed."""
        import torch

        from ..inference import generate
        from ..runtime.shared_errors import gather_objects

        end, prompt = tokenizer.end_id, tokenizer.encode(self.prompt)
        if not prompt:
            raise ValueError("--prompt is empty: use at least one character, or leave it out")
        number = -(-self.num // ranks)
        prompts = torch.tensor([prompt] * number, device=next(model.parameters()).device)
        mine = generate(
            model, prompts, self.tokens, self.max_length, sampling.temperature, sampling.top_k, sampling.top_p,
            self.seed, end, (rank * number, self.num),
        ).tolist()  # fmt: skip
        of_ranks = gather_objects(mine) if ranks > 1 else [mine]
        texts = [tokens for of_rank in of_ranks for tokens in of_rank][: self.num]
        return [tokenizer.decode(prompt + t[: t.index(end) if end in t else None]) for t in texts]
