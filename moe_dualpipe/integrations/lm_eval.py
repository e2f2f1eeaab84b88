"""This project's models in lm-evaluation-harness (`pip install lm-eval`), under the name "moe-dualpipe".

    moe-dualpipe eval runs/tiny --tasks arc_easy

or in Python:

    import lm_eval
    import moe_dualpipe.integrations.lm_eval  # registers the name

    lm_eval.simple_evaluate("moe-dualpipe", {"path": "runs/tiny", "max_length": 256}, tasks=["arc_easy"])

For a request, the harness expects the log-likelihood of a continuation, that of a whole text, or generated text.
Batches contain only sequences of the same length: padding would be routed to experts, like tokens.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import open_model
from ..inference import eval_mode, generate, stream_losses, token_losses
from ..messages import check_range, quoted

try:
    import lm_eval.models  # type: ignore[import-not-found]  # noqa: F401  it registers no others after ours
    from lm_eval.api.model import LM  # type: ignore[import-not-found]
    from lm_eval.api.registry import register_model  # type: ignore[import-not-found]
except ImportError as error:
    raise ImportError("evaluation on tasks needs lm-evaluation-harness: pip install lm-eval") from error

NAME = "moe-dualpipe"
_NEW_TOKENS = 256  # to generate, for tasks that do not say how many


@register_model(NAME)
class MoEDualPipe(LM):
    """A model of this project for lm-evaluation-harness. Each request has a tuple `args`.

    path: the folder of a run, of a checkpoint, or of a published model. max_length: maximum number of tokens that
    the model attends to; use the sequence length of training. batch_size: sequences at a time. device: cpu (in fp32),
    cuda (in bf16), or auto. own_layers: as for `open_model`. max_batch_size: ignored.

    Raises ValueError for a folder without a model, or with token ids whose tokenizer is unknown.
    """

    def __init__(
        self, path: str, max_length: int = 256, batch_size: int | str = 8, device: str = "auto",
        own_layers: Mapping[str, str | None] | None = None, max_batch_size: int | None = None,
    ):  # fmt: skip
        super().__init__()
        kind: Any = str(device).partition(":")[0]
        self.model, self.text = open_model(path, own_layers, kind)
        if not self.text.end_text:
            raise ValueError(f"{path} has {self.text}: tasks need its tokenizer.json")
        self.max_length, self.batch_size = int(max_length), int(batch_size)
        check_range("max_length", self.max_length, 2)
        check_range("batch_size", self.batch_size, 1)
        self._device = next(self.model.parameters()).device

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p(continuation | context), and whether greedy decoding gives it.

        Contexts are cut at their start to fit into `max_length`. A longer continuation is scored in parts of that
        length, each after the token before it.
        """
        pairs, size = [self._encode_pair(*request.args) for request in requests], self.max_length
        parts = [
            (i, context + text[:first], text[first : first + size])
            for i, (context, text) in enumerate(pairs) for first in range(0, len(text), size)
        ]  # fmt: skip
        rows = [(context + text)[-size - 1 :] for _, context, text in parts]
        found = [(0.0, True)] * len(pairs)
        with eval_mode([self.model]):
            for batch in self._batches({k: len(row) for k, row in enumerate(rows)}):
                ids_BS = torch.tensor([rows[k] for k in batch], device=self._device)
                losses_BS, greedy_BS = token_losses(self.model, ids_BS[:, :-1], ids_BS[:, 1:])
                for k, losses_S, greedy_S in zip(batch, losses_BS.double(), greedy_BS, strict=True):
                    i, _, text = parts[k]
                    scored, (value, greedy) = slice(len(losses_S) - len(text), None), found[i]
                    found[i] = value - losses_S[scored].sum().item(), greedy and bool(greedy_S[scored].all())
        return self._remembered("loglikelihood", requests, found)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """For each (text,): the log-likelihood of all its tokens. The first one follows the token that begins a text,
        or else one that ends a document.
        """
        found = []
        for (text,) in (request.args for request in requests):
            first, ids = self._encode_pair("", text)
            tokens = torch.tensor([*first, *ids]).numpy()
            losses = stream_losses(self.model, tokens, self.max_length, batch_size=self.batch_size)
            found.append(-sum(batch.double().sum().item() for batch in losses) if len(tokens) > 1 else 0.0)
        return self._remembered("loglikelihood_rolling", requests, found)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """For each (context, options): the text that follows, up to one of the strings `until` or the document's end.

        options: until, max_gen_toks (256), do_sample, temperature, top_k, top_p. Without do_sample, decoding is greedy.
        """
        found, stops = [], (self.text.end_id, *self.text.stop_ids)
        for context, options in (request.args for request in requests):
            until, number = options.get("until") or [], int(options.get("max_gen_toks") or _NEW_TOKENS)
            sample = bool(options.get("do_sample", options.get("temperature", 0.0)))
            room = max(1, self.max_length - number)
            prompt = torch.tensor([(self.text.encode(context) or [self.text.end_id])[-room:]], device=self._device)
            tokens = generate(
                self.model, prompt, number, self.max_length, options.get("temperature", 1.0) if sample else 0.0,
                options.get("top_k"), options.get("top_p", 1.0), stop=stops,
            )[0].tolist()  # fmt: skip
            text = self.text.decode([*takewhile(lambda token: token not in stops, tokens)])
            ends = [text.find(end) for end in ([until] if isinstance(until, str) else until) if end]
            found.append(text[: min((end for end in ends if end >= 0), default=None)])
        return self._remembered("generate_until", requests, found)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both as token ids. As in the harness's models, spaces at the end of a context move to the continuation."""
        kept = context.rstrip()
        if kept:
            context, continuation = kept, context[len(kept) :] + continuation
        before = self.text.encode(context)
        return before or [self.text.end_id], self.text.encode(context + continuation)[len(before) :]

    def _batches(self, lengths: Mapping[int, int]) -> Iterator[list[int]]:
        """The keys of rows with the same length, at most `batch_size` at a time."""
        for _, alike in groupby(sorted(lengths, key=lengths.__getitem__), key=lengths.__getitem__):
            same = [*alike]
            yield from (same[i : i + self.batch_size] for i in range(0, len(same), self.batch_size))

    def _remembered(self, method: str, requests: Sequence[Any], results: list[Any]) -> list[Any]:
        """The results, after adding them to the harness's cache."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(method, request.args, result)
        return results


def evaluate(
    model: MoEDualPipe, tasks: Sequence[str], include_path: str | None = None, num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The results of `lm_eval.simple_evaluate`. include_path: a folder with more tasks, as YAML files.

    Raises ValueError for an unknown task.
    """
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if not manager.match_tasks([task]) and not Path(task).is_file():
            near = difflib.get_close_matches(task[:100], manager.all_tasks, n=3, cutoff=0.0)
            raise ValueError(f"unknown task {quoted(task, 60)}; near names: {', '.join(near)}")
    return simple_evaluate(
        model, tasks=[*tasks], num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
    )


def results_table(results: dict[str, Any]) -> str:
    """The harness's table of results, in Markdown."""
    from lm_eval.utils import make_table  # type: ignore[import-not-found]

    return make_table(results).rstrip()
