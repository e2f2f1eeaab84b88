"""Tokens per second of `moe-dualpipe data prepare`, beside the `datasets` library of Hugging Face.

    pip install 'moe-dualpipe[bpe,data]'
    python -m benchmarks.prepare

Both read the sources of Python's standard library, a document per row in FILES files, and encode them with the same
tokenizer and one thread per process. `datasets` starts from an Arrow file in its cache, whose creation is not timed;
`map` writes the ids into another one. To train, the ids must also be put into one file; that is timed separately. Ours
writes two files, without and with the held-out text, and starts its processes within the measured time.
"""

import dataclasses
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import full_range, ratios, table, take_turns
from moe_dualpipe.data import TOKENIZER_FILE, prepare_data
from moe_dualpipe.data.documents import Documents

Case = tuple[str, int]
FILES = 4
OURS, MAP, ONE_FILE = "data prepare", "datasets: map", "datasets: map, then one file"


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare `data prepare` with the datasets library."""

    workers: tuple[int, ...] = (1, 2)
    rounds: int = 5
    repeat: int = 1
    """Use the text this many times, with different first lines."""


def main(options: Options) -> None:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_HOME"] = str(folder / "cache")
        text_bytes = _write_text(folder / "text", options.repeat)
        tokenizer = folder / "trained" / TOKENIZER_FILE
        prepare_data(["stdlib"], tokenizer.parent, "bpe", 4096, "text")
        library = import_module("datasets")
        rows = library.load_dataset("json", data_files=str(folder / "text" / "*.jsonl"), split="train")
        with_ours = functools.partial(_ours, folder, tokenizer)
        with_datasets = functools.partial(_datasets, folder, tokenizer, rows)
        cases: dict[Case, Callable[[], tuple[int, *tuple[float, ...]]]] = {}
        for workers in options.workers:
            cases[OURS, workers] = functools.partial(with_ours, workers)
            cases[MAP, workers] = functools.partial(with_datasets, workers)
        measured = take_turns(options.rounds, cases, warm_up=1)
    seconds: dict[Case, list[float]] = {}
    num_tokens = set()
    for (what, workers), results in measured.items():
        num_tokens |= {tokens for tokens, *_ in results}
        seconds[what, workers] = [times[0] for _, *times in results]
        if what == MAP:
            seconds[ONE_FILE, workers] = [sum(times) for _, *times in results]
    (tokens,) = num_tokens  # the same ids
    print(f"{text_bytes / 1e6:.1f} MB of text, {tokens:,} tokens; the median of {options.rounds} rounds (range)\n")
    print(_table(options.workers, seconds, tokens))


def _table(workers: tuple[int, ...], seconds: dict[Case, list[float]], tokens: int) -> str:
    rows = []
    for number in workers:
        for what in (OURS, MAP, ONE_FILE):
            rates = [tokens / second / 1e3 for second in seconds[what, number]]
            relative = ratios(seconds[what, number], seconds[OURS, number])
            speed = f"{np.median(rates):,.0f} ({full_range(rates, ',.0f')})"
            rows.append((what, str(number), speed, f"{np.median(relative):.2f} ({full_range(relative)})"))
    return table("program | processes | thousand tokens/s | time / time of `data prepare`", rows)


def _write_text(folder: Path, repeat: int) -> int:
    folder.mkdir()
    rows, size = [[] for _ in range(FILES)], 0
    for i in range(repeat):
        for number, document in enumerate(Documents.find("stdlib")):
            text = f"# {i}\n{document}"
            size += len(text.encode())
            rows[number % FILES].append(json.dumps({"text": text}) + "\n")
    for i, lines in enumerate(rows):
        (folder / f"{i}.jsonl").write_text("".join(lines))
    return size


def _ours(folder: Path, tokenizer: Path, workers: int) -> tuple[int, float]:
    """The number of tokens, and the seconds."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        start = time.perf_counter()
        done = prepare_data([str(folder / "text")], Path(out) / "out", str(tokenizer), 1, "text", workers=workers)
        return sum(sidecar.tokens for sidecar in done.sidecars), time.perf_counter() - start


def _datasets(folder: Path, tokenizer: Path, rows: Any, workers: int) -> tuple[int, float, float]:
    """The number of tokens, the seconds of `map`, and those to write the ids into one file."""
    library = import_module("tokenizers").Tokenizer.from_file(str(tokenizer))
    end = library.token_to_id("<|endoftext|>")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
        encoded = library.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [np.array([*one.ids, end], np.uint16) for one in encoded]}

    with tempfile.TemporaryDirectory(dir=folder) as out:
        start = time.perf_counter()
        mapped = rows.map(
            encode, batched=True, batch_size=64, num_proc=workers if workers > 1 else None, remove_columns=["text"],
            load_from_cache_file=False, cache_file_name=f"{out}/ids.arrow", new_fingerprint=Path(out).name,
        )  # fmt: skip
        between = time.perf_counter()
        tokens = 0
        with open(f"{out}/train.bin", "wb") as file:
            for batch in mapped.with_format("numpy").iter(256):
                for ids in batch["ids"]:
                    file.write(np.asarray(ids, "<u2").tobytes())
                    tokens += len(ids)
        return tokens, between - start, time.perf_counter() - between


if __name__ == "__main__":
    main(tyro.cli(Options))
