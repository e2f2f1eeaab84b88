"""A conversation in a terminal. The chat template makes a prompt of all messages; the answer is printed as it comes.

Each answer reads the whole conversation again: a template may render earlier messages differently from turn to turn.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..data import Tokenizer
from ..data.chats import Chat, ChatTemplate
from ..models import TransformerStage
from .eval_mode import eval_mode
from .generation import Batch, decoding, printable_text
from .sampling import Sampling, generators

EXIT = "/exit"


@torch.no_grad()
def stream(
    model: TransformerStage, prompt_S: Tensor, num_tokens: int, max_length: int, sampling: Sampling, seed: int,
    stops: Sequence[int],
) -> Iterator[int]:  # fmt: skip
    """Yield the tokens that follow a prompt, up to one of `stops`. Arguments and errors are those of `generate`."""
    steps = decoding([prompt_S], num_tokens, max_length, model.config.vocab_size, stops)
    batch = Batch([0], steps, generators(seed, 1))
    with eval_mode([model]):
        while batch.result is None:
            batch.cache.length = batch.past
            output = model(batch.new_BS, None, batch.cache)
            next_B = sampling.draw(model.logits(output[:, -1]), batch.random, batch.wanted)
            if (token := int(next_B[0])) in stops:
                return
            yield token
            batch.advance(next_B)


def converse(
    model: TransformerStage, tokenizer: Tokenizer, template: ChatTemplate, num_tokens: int, max_length: int,
    sampling: Sampling, seed: int, read: Callable[[str], str] = input,
) -> None:  # fmt: skip
    """Read messages and print answers, until EXIT or the end of the input. Ctrl-C ends an answer, which is kept."""
    messages, stops, device = list[dict[str, str]](), template.stops(tokenizer), next(model.parameters()).device
    while True:
        try:
            text = read("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if text == EXIT:
            return
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        prompt = template.text(Chat("the conversation", messages), prompt=True)
        ids = torch.from_numpy(tokenizer.encode_batch([prompt], special_tokens=True)[0].astype("int64")).to(device)
        tokens, shown = list[int](), ""
        try:
            for token in stream(model, ids, num_tokens, max_length, sampling, seed + len(messages), stops):
                tokens.append(token)
                answer = tokenizer.decode(tokens)
                if not answer.endswith("\ufffd"):  # part of a character
                    print(printable_text(answer[len(shown) :]), end="", flush=True)
                    shown = answer
        except KeyboardInterrupt:
            pass
        print()
        messages.append({"role": "assistant", "content": tokenizer.decode(tokens)})
