"""`moe-dualpipe generate`: text from a run, a checkpoint or an exported folder, in one process."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from ..messages import check_range
from .own_layers import NO_OWN_LAYERS, OwnLayers


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with the model of a run, which may still be training."""

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
    layers: OmitArgPrefixes[OwnLayers] = NO_OWN_LAYERS
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu, cuda (in bfloat16), or auto: cuda if there is a GPU, otherwise cpu."""
    traceback: bool = False
    """Print the whole traceback of an error in your own layer, instead of one line with its file and line number."""

    def run(self) -> None:
        import torch

        from ..checkpoint import open_model
        from ..inference import Sampling, generate, printable_text

        check_range("--num", self.num, 1, 1000)
        check_range("--tokens", self.tokens, 0, 1_000_000)
        check_range("--max-length", self.max_length, 1)
        check_range("--seed", self.seed, -(2**63), 2**63 - 1)
        sampling = Sampling(self.temperature, self.top_k or None, self.top_p)  # raises ValueError
        model, tokenizer = open_model(self.run_or_checkpoint, self.layers.named(), self.device)
        end, prompt = tokenizer.end_id, tokenizer.encode(self.prompt)
        if not prompt:
            raise ValueError("--prompt is empty: use at least one character, or leave it out")
        prompts = torch.tensor([prompt] * self.num, device=next(model.parameters()).device)
        texts = generate(
            model, prompts, self.tokens, self.max_length, sampling.temperature, sampling.top_k, sampling.top_p,
            self.seed, end,
        )  # fmt: skip
        for i, tokens in enumerate(texts.tolist(), 1):
            if self.num > 1:
                print(f"--- {i} of {self.num}")
            print(printable_text(tokenizer.decode(prompt + tokens[: tokens.index(end) if end in tokens else None])))
