"""`moe-dualpipe generate`: text from the newest checkpoint of a run, in one process."""

from dataclasses import dataclass

from tyro.conf import Positional


@dataclass(frozen=True)
class Generate:
    """Continue a text with what a run has learned; it may go on meanwhile."""

    run_or_checkpoint: Positional[str]
    """A run's folder, for its newest checkpoint, or one checkpoint in it."""
    prompt: str = "\n"
    """What the text starts with."""
    tokens: int = 200
    """The most tokens that follow; a text ends before that where the document does."""
    num: int = 1
    """How many texts, made as one batch."""
    temperature: float = 0.8
    """Less is more of the same, 0 takes the likeliest token each time."""
    top_k: int = 0
    """Choose each token among so many, the likeliest. 0: among all."""
    top_p: float = 1.0
    """Choose each token among the likeliest that have this probability together. 1: among all."""
    max_length: int = 256
    """The most tokens that the model sees at a time: the --seq-len that it was trained with."""
    seed: int = 0
    """The same seed gives the same texts."""
    experts: str = "swiglu"
    """Expert layer of your own, "module:Class": a checkpoint that has one cannot choose what is imported."""
    device: str = "auto"
    """cpu, cuda (in bfloat16), or auto: the GPU if there is one."""

    def run(self) -> None:
        import torch

        from ..checkpoint import find_checkpoint, load_model
        from ..data import find_tokenizer
        from ..inference.generate import generate
        from ..inference.pipeline import printable
        from ..runtime.launch import choose_device

        if self.num < 1:
            raise ValueError(f"--num must be at least 1: got {self.num}")
        device = torch.device(choose_device(self.device, torch.cuda.device_count(), 1))
        found = find_checkpoint(self.run_or_checkpoint)
        tokenizer = find_tokenizer(found)
        end, prompt = tokenizer.end_id, tokenizer.encode(self.prompt)
        if not prompt:
            raise ValueError("--prompt is empty: give what the texts start with, or leave it out")
        prompts = torch.tensor([prompt] * self.num, device=device)
        model = load_model(found, self.experts).to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        texts = generate(
            model, prompts, self.tokens, self.max_length, self.temperature, self.top_k,
            self.top_p, self.seed, end,
        )  # fmt: skip
        for i, tokens in enumerate(texts.tolist(), 1):
            if self.num > 1:
                print(f"--- {i} of {self.num}")
            print(printable(tokenizer.decode(prompt + tokens[: tokens.index(end) if end in tokens else None])))
