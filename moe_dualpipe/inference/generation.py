"""Generation with a model in one stage: prompts in one forward, then one position at a time with a key/value cache.

Texts advance in batches. If the experts are spread over ranks, two batches take turns, and each hides the other's
communication, as in DeepSeek's published inference profiles. When a batch ends, the next one takes its place: its
prefill runs beside the decoding of the other.

A cache cannot drop only its first positions: what it stores of a position was computed from all positions before it.
When it holds `max_length` positions, the newer half is read again and the older half is dropped. Until then a token is
the same as with a forward of the whole text. A text does not depend on the other texts.

B sequences, S positions, N tokens to generate, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..expert_parallel.gather import gather_objects
from ..messages import check_range
from ..models import KVCache, MoE, TransformerStage
from .sampling import Sampling, generators

Value = TypeVar("Value")
Steps = Generator[tuple[Tensor, int, list[bool]], Any, Tensor]
"""Yields the tokens [B, S] that follow the cached positions, the number of these, and which rows need their next token.
It is sent the next token of each row, [B]. Returns the new tokens, [B, N]."""


# ---- Ranks that share experts ----
#
# A dispatch needs all ranks. So they run the same number of forwards, divided into micro-batches in the same way. A
# rank without sequences left runs empty forwards.
#
# Two micro-batches hide each other's dispatch and combine. That pays if transfers go on while a rank computes, and if
# some rank has two sequences. Otherwise there is one micro-batch, whose products are larger.


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks of `group`; None: all ranks of torch.distributed. alone: only this one.

    in_background: there are transfers, and they go on while this process computes (`DividedExperts.in_background`).
    """

    in_background: bool
    group: dist.ProcessGroup | None = None
    alone: bool = False

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if dist.is_initialized() and not self.alone else 1

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.size > 1 else 0

    def micro_batches(self, sequences: int) -> int:
        """The number of micro-batches that take turns. sequences: those of the rank with the most."""
        return 2 if self.in_background and sequences >= 2 else 1

    def most(self, number: int) -> int:
        """The largest number of any rank. Collective."""
        return max(self.gather(number))  # not all_reduce: a group may have NCCL alone, which takes no numbers of a CPU

    def gather(self, mine: Value) -> list[Value]:
        """The values of all ranks. Collective."""
        return gather_objects(mine, self.group) if self.size > 1 else [mine]


ALONE = ExpertRanks(in_background=False, alone=True)


# ---- One forward ----


@contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside this context, the modules are in evaluation mode: dropout is off, and running statistics do not change.

    Afterwards, each submodule gets its own mode back.
    """
    roots = [*modules]
    before = [(part, part.training) for root in roots for part in root.modules()]
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        for part, training in before:  # parents come first: `train` also changes submodules
            if part.training != training:
                part.train(training)


@torch.no_grad()
def prefill(stage: TransformerStage, x: Tensor) -> Tensor:
    """The outputs of `stage(x)` for all sequences x, [B, S] or [B, S, D], computed as two interleaved halves.

    A single sequence is not interleaved. With expert parallelism the order of communication must be the same on all
    ranks: either each has at least two sequences, or each has one.
    """
    return in_halves(stage, x) if len(x) > 1 else stage(x)


def in_halves(stage: TransformerStage, x: Tensor) -> Tensor:
    """`prefill` of any number of sequences. A half may be empty."""
    first, second = x.tensor_split(2)
    return torch.cat(stage.interleaved_forward(stage, [first], stage, [second]))


@torch.no_grad()
def generate(
    model: TransformerStage, prompts: Tensor | Sequence[Tensor], num_tokens: int, max_length: int,
    temperature: float = 0.8, top_k: int | None = None, top_p: float = 1.0, seed: int = 0,
    stop: int | Sequence[int] | None = None, first: int = 0, batch_size: int | None = None,
    ranks: ExpertRanks | None = None, on_tokens: Callable[[Tensor], object] = lambda _: None,
) -> Tensor:  # fmt: skip
    """Return the `num_tokens` tokens that follow each prompt: [B, N].

    model: a whole model in one stage, which runs in evaluation mode. prompts: [B, S], or B tensors [S] of any length.
    max_length: the most positions that the model attends to. temperature, top_k, top_p: see `Sampling`. stop: a token
    that ends a sequence, or several; the rest of the row is filled with the first. first: the number of texts on lower
    ranks, for the same random numbers on any number of ranks. batch_size: the most texts at a time; None: all. ranks:
    the ranks that share the experts, each with prompts of its own, or none; `batch_size` is the same on all. None: all
    ranks of torch.distributed if the experts are spread, otherwise this rank alone. on_tokens: called with the next
    token of each text of a batch, as soon as it is drawn.

    Raises ValueError for a stage that is not a whole model, for prompts that are empty or have invalid token ids, and
    for invalid numbers.
    """
    if not (model.spec.embedding and model.spec.head):
        raise ValueError(f"generate needs a whole model, from embedding to head: got a stage with {model.spec}")
    stops = [] if stop is None else [stop] if isinstance(stop, int) else [*stop]
    sampling, limits = Sampling(temperature, top_k, top_p), (num_tokens, max_length, model.config.vocab_size, stops)
    check_range("batch_size", 1 if batch_size is None else batch_size, 1)
    if ranks is None:
        backends = [layer.expert_parallel for layer in model.modules() if isinstance(layer, MoE)]
        spread = any(len(backend.local_experts) < backend.num_experts for backend in backends)
        ranks = ExpertRanks(in_background=spread, alone=not spread)
    number = max(1, ranks.most(len(prompts)))
    at_once = min(batch_size or number, number)
    in_turn = ranks.micro_batches(at_once)
    size = at_once // in_turn if at_once < number else -(-at_once // in_turn)
    # Texts of similar lengths advance ranks, the longest first.
    order = sorted(range(len(prompts)), key=lambda text: -prompts[text].numel())
    random = generators(seed, len(prompts), first)
    batches = [
        Batch(texts, decoding([prompts[text] for text in texts], *limits), [random[text] for text in texts])
        for at in range(0, number, size) if (texts := order[at : at + size]) or ranks.size == 1
    ]  # fmt: skip
    device = next(model.parameters()).device
    none = torch.zeros(0, 1, dtype=torch.int64, device=device)

    def next_tokens(running: list[Batch]) -> list[Tensor]:
        inputs: list[Any] = [[batch.new_BS, None, batch.cache] for batch in running]
        for batch in running:
            batch.cache.length = batch.past
        inputs += [[none]] * (in_turn - len(running))  # other ranks need the experts of this one
        if in_turn == 2:
            outputs = model.interleaved_forward(model, inputs[0], model, inputs[1])
        else:
            outputs = (model(*inputs[0]),)
        drawn = []
        for batch, output in zip(running, outputs, strict=False):
            drawn.append(sampling.draw(model.logits(output[:, -1]), batch.random, batch.wanted))
            on_tokens(drawn[-1])
        return drawn

    with eval_mode([model]):
        run_batches(batches, in_turn, next_tokens, ranks)
    found = torch.zeros(len(prompts), num_tokens, dtype=torch.int64, device=device)
    for batch in batches:
        found[batch.texts] = batch.result
    return found


class Batch:
    """Texts that advance together, by their indices, and what the next forward needs."""

    def __init__(self, texts: Sequence[int], steps: Steps, random: list[torch.Generator]):
        self.texts, self.steps, self.random, self.cache = texts, steps, random, KVCache()
        self.result: Any = None
        """The new tokens, once they are complete."""
        self.advance(None)

    def advance(self, next_B: Tensor | None) -> None:
        try:
            self.new_BS, self.past, self.wanted = self.steps.send(next_B)
        except StopIteration as stop:
            self.result, self.cache = stop.value, KVCache()


def run_batches(
    batches: Sequence[Batch], in_turn: int, next_tokens: Callable[[list[Batch]], list[Tensor]], ranks: ExpertRanks
) -> None:
    """Run all batches to their ends, `in_turn` of them at a time, until those of all ranks have ended.

    next_tokens: runs one forward of up to `in_turn` batches, and returns the next token of each text, [B] per batch.
    """
    waiting, running = deque(batch for batch in batches if batch.result is None), list[Batch]()
    while ranks.most(len(waiting) + len(running)):
        while waiting and len(running) < in_turn:
            running.append(waiting.popleft())
        for batch, next_B in zip(running, next_tokens(running), strict=True):
            batch.advance(next_B)
        running = [batch for batch in running if batch.result is None]


@contextmanager
def recorded_routes(model: TransformerStage, num_texts: int) -> Iterator[dict[int, Tensor]]:
    """Record the experts of each position that `generate` reads. At the end, the dict has them by layer: [B, S, K].

    The positions are those of the texts as long as they fit into `max_length`. The last token of a text is not read.
    """
    parts, routes = dict[int, list[Tensor]](), dict[int, Tensor]()
    with ExitStack() as hooks:
        for layer in (module for module in model.modules() if isinstance(module, MoE)):
            seen = parts.setdefault(layer.layer, [])

            def note(_router: object, _inputs: object, decision: tuple[Tensor, ...], seen: list[Tensor] = seen) -> None:
                seen.append(decision[1].unflatten(0, (num_texts, -1)))

            handle = layer.router.register_forward_hook(note)
            hooks.callback(handle.remove)
        yield routes
    routes |= {layer: torch.cat(seen, 1) for layer, seen in parts.items() if seen}


def decoding(
    prompts: Tensor | Sequence[Tensor], num_tokens: int, max_length: int, vocab_size: int, stops: Sequence[int] = ()
) -> Steps:  # fmt: skip
    """The steps of a batch. Arguments and errors are those of `generate`. stops: of `stop`.

    All sequences advance ranks: while a longer prompt supplies its next token, a shorter one already gets a new one.
    So all have the same positions, and no mask is needed. The batch ends when no sequence needs another token.
    """
    tokens_BS, lengths = _token_buffer(prompts, num_tokens, max_length, vocab_size)
    lengths_B, stops_N = (torch.tensor(one, device=tokens_BS.device) for one in (lengths, [*stops]))
    start, past, ended_B = 0, 0, torch.zeros_like(lengths_B, dtype=torch.bool)
    dropped = max_length + 1 - max(1, max_length // 2)
    for end in range(min(lengths), tokens_BS.shape[1]):
        # It depends on `end` alone: the lengths of other prompts do not change what a text sees.
        if (first := max(0, -(-(end - max_length) // dropped) * dropped)) != start:
            start, past = first, 0
        next_B = yield tokens_BS[:, start + past : end], past, [end >= length for length in lengths]
        past, in_prompt_B = end - start, end < lengths_B
        if stops:
            next_B = next_B.where(~ended_B, stops[0])
            ended_B |= torch.isin(next_B, stops_N) & ~in_prompt_B
        tokens_BS[:, end] = tokens_BS[:, end].where(in_prompt_B, next_B)
        if stops and bool((ended_B | (end + 1 >= lengths_B + num_tokens)).all()):
            tokens_BS[:, end + 1 :] = stops[0]
            break
    return tokens_BS.gather(1, lengths_B[:, None] + torch.arange(num_tokens, device=tokens_BS.device))


def _token_buffer(
    prompts: Tensor | Sequence[Tensor], num_tokens: int, max_length: int, vocab_size: int
) -> tuple[Tensor, list[int]]:
    """The prompts with space for new tokens, [B, longest prompt + N], and their lengths."""
    check_range("num_tokens", num_tokens, 0)
    check_range("max_length", max_length, 1)
    shapes = [[*prompt.shape] for prompt in prompts]
    if not shapes or any(len(shape) != 1 or not shape[0] for shape in shapes):
        raise ValueError(f"generate needs prompts, each [S] with at least one token: got {shapes}")
    lengths = [length for (length,) in shapes]
    tokens_BS = prompts[0].new_zeros(len(shapes), max(lengths) + num_tokens, dtype=torch.int64)
    for row_S, prompt_S in zip(tokens_BS, prompts, strict=True):
        row_S[: len(prompt_S)] = prompt_S
    low, high = int(tokens_BS.min()), int(tokens_BS.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}: got {low if low < 0 else high} in a prompt")
    return tokens_BS, lengths


def printable_text(text: str) -> str:
    """`text` with spaces for tabs, and U+FFFD for other control characters, which could change a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
