"""`moe-dualpipe data`: encode text into token ids on disk once, instead of at the start of every run."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..command_line import Mark, Positional
from ..data import HELD_OUT_FILES, TOKENIZER_FILE, TRAIN_FILE, Sidecar, TokenFile, prepare_data
from ..messages import plural, printable, shell_word


def refuse_url(text: str) -> None:
    """Raise ValueError for a URL, also if it was read as a path, which has one slash."""
    if re.match(r"[a-z0-9]{2,}:/", text):
        raise ValueError(f"{printable(text)} is a URL: this command reads and writes local files only; copy the folder")


@dataclass(frozen=True)
class PrepareData:
    """Encode text into a folder of token ids, for `train.py --data FOLDER`."""

    sources: Positional[Annotated[tuple[str, ...], Mark("SOURCE [SOURCE ...]")]]
    """Text: files, folders, globs, "stdlib", or hf:NAME for a dataset of the Hugging Face Hub.
    Each row of .jsonl, .json, .csv, .tsv (also .gz, .zst), .parquet and .arrow files is a document."""
    out: Path
    """Folder to write: a new or an empty one."""
    tokenizer: str = "bpe"
    """bpe (trained on this text), bytes, or the path of a tokenizer.json."""
    vocab_size: int = 4096
    """Maximum vocabulary size of the trained BPE."""
    field: str = "text"
    """Field of each row that has the text."""
    special_tokens: bool = False
    """Encode special tokens in the text, such as <|im_start|> in a chat, as one id. Otherwise, as characters."""
    chat_template: Path | None = None
    """File with the chat template for rows with chats. None: that beside the tokenizer."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens of chats to train on: those that the assistant wrote, or all."""
    workers: int | None = None
    """Processes that encode, each one file of rows or many small files of text. Default: one for each CPU core. The
    result is the same."""

    def run(self) -> None:
        for name in (str(self.out), *self.sources):
            refuse_url(name)
        done = prepare_data(
            list(self.sources), self.out, self.tokenizer, self.vocab_size, self.field,
            special_tokens=self.special_tokens,
            workers=os.cpu_count() or 1 if self.workers is None else self.workers,
            show=True, chat_template=self.chat_template, train_on=self.train_on,
        )  # fmt: skip
        if done.finished_before:
            print(f"{done.finished_before:,} of {plural(done.shards, 'shard')} were finished before")
        tokenizer = done.tokenizer
        print(f"{printable(self.out / TOKENIZER_FILE)}: {tokenizer}, {tokenizer.end_id} ends a document")
        for name, sidecar in zip((TRAIN_FILE, HELD_OUT_FILES[0]), done.sidecars, strict=True):
            print(f"{printable(self.out / name)}: {_describe(sidecar)}")
        size = f"--set model.vocab_size={tokenizer.vocab_size}"
        print(f"to train: python train.py --data {shell_word(str(self.out))} {size}")


@dataclass(frozen=True)
class CheckData:
    """Read whole files of token ids. Check their checksums, and that every id is in the vocabulary."""

    files: Positional[Annotated[tuple[Path, ...], Mark("FILE [FILE ...]")]]
    """Files that `prepare` wrote."""

    def run(self) -> None:
        if not self.files:
            raise ValueError("name at least one FILE of token ids, such as corpus/train.bin")
        for path in self.files:
            refuse_url(str(path))
            file = TokenFile.open(path, "uint16")
            if file.sidecar is None:
                raise ValueError(f"cannot check {printable(path)}: there is no {printable(path.name)}.json next to it")
            file.scan(file.tokenizer(file.sidecar.vocab_size).vocab_size)
            print(f"{printable(path)}: OK; {_describe(file.sidecar)}")


def _describe(sidecar: Sidecar) -> str:
    return (
        f"{plural(sidecar.documents, 'document')}, {plural(sidecar.tokens, 'token')} of {sidecar.dtype}, "
        f"{sidecar.bytes / sidecar.tokens:.3f} bytes per token"
    )
