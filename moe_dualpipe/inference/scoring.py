"""Score given tokens with a model: the loss of each token of a batch, or of a long text.

A text longer than the model's sequences is cut into windows. Each token but the first of the text is scored once, in
the first window that predicts it. With a stride below the sequence length, windows overlap: each scores fewer
tokens, but these have at least (sequence length - stride) tokens before them.

B sequences, S positions, N tokens of the text.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from ..data import Tokenizer, UnknownTokenizer, num_bytes
from ..data.samples import LABEL, START
from ..data.token_files import TokenStream
from ..expert_parallel.gather import first_fault
from ..messages import check_range
from ..models import TransformerStage
from ..models.load_statistics import counted_loads, describe_loads, sum_of_ranks
from .generation import ALONE, ExpertRanks, eval_mode, in_halves


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """Positions `start` to `stop` of a text, which predict the tokens after them. The first `seen` of these tokens
    are scored in earlier windows."""

    start: int
    stop: int
    seen: int


def windows(num_tokens: int, seq_len: int, stride: int) -> Iterator[ScoredWindow]:
    """The windows that score all tokens of a text but the first, each once.

    The last window ends with the text and has the full length, if the text is that long.
    Example: 8 tokens, seq_len 4, stride 3: positions 0-3 (scores tokens 1-4), then 3-6 (seen 1, scores 5-7).
    """
    last, done, start = num_tokens - 1, 0, 0
    while done < last:
        start = max(0, min(start, last - seq_len))
        stop = min(start + seq_len, last)
        yield ScoredWindow(start, stop, done - start)
        start, done = start + stride, stop


@torch.no_grad()
def token_losses(
    model: TransformerStage, inputs_BS: Tensor, labels_BS: Tensor, halves: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of each label in nats, in fp32, and whether it is the most likely token: both [B, S].

    model: a whole model in one stage. The caller sets its evaluation mode. halves: as two interleaved micro-batches.
    """
    output_BSX = in_halves(model, inputs_BS) if halves else model(inputs_BS)
    losses_BS = torch.zeros(labels_BS.shape, device=labels_BS.device)
    greedy_BS = torch.zeros_like(labels_BS, dtype=torch.bool)
    for row, (output_SX, labels_S) in enumerate(zip(output_BSX, labels_BS, strict=True)):
        logits_SV = model.logits(output_SX[None])[0].float()  # of one sequence at a time
        losses_BS[row] = F.cross_entropy(logits_SV, labels_S, reduction="none")
        greedy_BS[row] = logits_SV.argmax(-1) == labels_S
    return losses_BS, greedy_BS


def stream_losses(
    model: TransformerStage, tokens: TokenStream, seq_len: int, stride: int | None = None, batch_size: int = 8,
    ranks: ExpertRanks = ALONE, firsts: Sequence[int] = (0,),
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the losses of all tokens of a text but the first: in order, one batch at a time, in nats, in fp32.

    tokens: N token ids. seq_len: positions that the model sees. stride: tokens between the starts of windows; None:
    seq_len, so windows do not overlap. batch_size: windows at a time, on each rank. ranks: the ranks that share the
    experts, and divide the windows. All yield the losses of all. firsts: where a text starts, if `tokens` has several.

    Raises ValueError for invalid numbers, for fewer than two tokens, and for token ids outside the vocabulary.
    """
    stride = seq_len if stride is None else stride
    check_range("seq_len", seq_len, 1)
    check_range("stride", stride, 1, seq_len)
    check_range("batch_size", batch_size, 1)
    if len(tokens) < 2:
        raise ValueError(f"a text needs at least two tokens, of which all but the first are scored: got {len(tokens)}")
    device, vocab_size = next(model.parameters()).device, model.config.vocab_size
    remaining = (
        ScoredWindow(first + window.start, first + window.stop, window.seen)
        for first, end in pairwise([*firsts, len(tokens)])
        for window in windows(end - first, seq_len, stride)
    )
    while some := [*islice(remaining, batch_size * ranks.size)]:
        ids_BS = np.zeros((len(some), 1 + max(window.stop - window.start for window in some)), np.int64)
        for row_S, window in zip(ids_BS, some, strict=True):  # what follows a shorter window is not scored
            row_S[: window.stop + 1 - window.start] = tokens[window.start : window.stop + 1]
        if ids_BS.max() >= vocab_size or ids_BS.min() < 0:
            wrong = ids_BS[(ids_BS >= vocab_size) | (ids_BS < 0)][0]
            raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, the vocabulary of the model: got {wrong}")
        share = -(-len(some) // ranks.size)
        rows_BS = torch.from_numpy(ids_BS[ranks.rank * share :][:share]).to(device)
        halves = ranks.micro_batches(share) == 2
        with eval_mode([model]):
            losses_BS, _ = token_losses(model, rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous(), halves)
        losses_BS = torch.cat(ranks.gather(losses_BS.cpu()))
        scored = zip(losses_BS, some, strict=True)
        yield torch.cat([losses_S[window.seen : window.stop - window.start] for losses_S, window in scored])


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a text. loss: in nats per token. tokens: number of scored tokens. bytes: of their text."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    """None if the tokenizer is unknown, and for chats."""
    tokens: int
    bytes: int | None
    seq_len: int
    stride: int
    tokens_per_second: float
    expert_loads: str = ""
    """How evenly the experts were used, in one line."""

    def __str__(self) -> str:
        every = f", every {self.stride}" if self.stride < self.seq_len else ""
        lines = (
            f"loss {self.loss:.4f} nats per token", f"perplexity {self.perplexity:,.3f}",
            "" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f} bits per byte", self.expert_loads,
            f"{self.tokens:,} tokens in windows of {self.seq_len}{every}; {self.tokens_per_second:,.0f} tokens/s",
        )  # fmt: skip
        return "\n".join(filter(None, lines))


def perplexity(
    model: TransformerStage, tokenizer: Tokenizer, tokens: TokenStream, seq_len: int, stride: int, batch_size: int,
    ranks: ExpertRanks = ALONE, flags_N: TokenStream | None = None,
) -> Perplexity:  # fmt: skip
    """The perplexity of a model on a text of token ids. All tokens but the first are scored. See `stream_losses`.

    flags_N: of the tokens of chats (data/samples.py): each is a text of its own, and only its labels count.
    """
    total, scored, read, started = 0.0, 0, 0, time.perf_counter()
    firsts, labels_N = [0], None
    if flags_N is not None:
        flags = flags_N[:]
        firsts = np.flatnonzero(flags & START).tolist()
        labels_N = torch.from_numpy((flags & LABEL)[(flags & START) == 0] > 0)
    progress = tqdm(total=len(tokens) - 1, unit=" tokens", leave=False, disable=ranks.rank > 0 or None)
    with counted_loads(model) as loads, progress as bar:
        for losses_N in stream_losses(model, tokens, seq_len, stride, batch_size, ranks, firsts):
            bar.update(len(losses_N))
            own_N = losses_N if labels_N is None else losses_N[labels_N[read : read + len(losses_N)]]
            total, scored, read = total + own_N.double().sum().item(), scored + len(own_N), read + len(losses_N)
    if not scored:
        raise ValueError("these tokens have no answer to score, only the start of a chat: use more of them")
    seconds, loss = time.perf_counter() - started, total / scored
    if not math.isfinite(loss):
        nonfinite = (name for name, weight in model.named_parameters() if not weight.isfinite().all())
        fault = first_fault(next(nonfinite, "")) if ranks.size > 1 else next(nonfinite, "")
        raise ValueError(f"the loss is {loss}: {f'{fault} is not finite' if fault else 'all weights are finite'}")
    unknown = isinstance(tokenizer, UnknownTokenizer) or labels_N is not None
    size = None if unknown else num_bytes(tokenizer, tokens[1:])
    return Perplexity(
        loss, math.exp(loss) if loss < 700 else math.inf, total / math.log(2) / size if size else None, scored, size,
        seq_len, stride, round(scored / seconds, 1), describe_loads(*sum_of_ranks(ranks.gather(loads))),
    )  # fmt: skip
