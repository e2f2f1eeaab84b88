"""`moe-dualpipe data`: text into token ids on disk, once, instead of at the start of every run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, subcommand

from ..data import token_files as corpus
from ..data.token_files import Sidecar, TokenFile
from ..data.tokenizer import FILE, Tokenizer


@dataclass(frozen=True)
class Prepare:
    """Turn text into a folder of token ids, which `train.py --data FOLDER` maps into memory."""

    sources: Positional[tuple[str, ...]]
    """Text: files, folders, globs, .jsonl, or "stdlib"."""
    out: Path
    """The folder to write; it must not be there yet."""
    tokenizer: str = "bpe"
    """bpe: learned from this text; bytes; or a tokenizer.json that is there already."""
    vocab_size: int = 4096
    """Most tokens that bpe learns."""
    field: str = "text"
    """The field of a .jsonl line that holds the text."""

    def run(self) -> None:
        tokenizer, sidecars = corpus.prepare(list(self.sources), self.out, self.tokenizer, self.vocab_size, self.field)
        print(f"{self.out / FILE}: {tokenizer}, {tokenizer.end_id} ends a document")
        for name, sidecar in zip((corpus.TRAIN, corpus.HELD_OUT_NAMES[0]), sidecars, strict=True):
            print(f"{self.out / name}: {_numbers(sidecar)}")
        print(f"to train: python train.py --data {self.out} --model.vocab-size {tokenizer.vocab_size}")


@dataclass(frozen=True)
class Check:
    """Read files of token ids whole, whatever their size: checksums, and that no id is past the vocabulary."""

    files: Positional[tuple[Path, ...]]
    """Files that `prepare` wrote."""

    def run(self) -> None:
        for path in self.files:
            file = TokenFile.open(path, "uint16")
            if file.sidecar is None:
                raise ValueError(f"{path} has no description beside it, {path.name}.json, to check it by")
            tokenizer: Tokenizer = file.tokenizer(file.sidecar.vocab_size)
            file.scan(tokenizer.vocab_size)
            print(f"{path}: as it was written; {_numbers(file.sidecar)}")


@dataclass(frozen=True)
class DataCommands:
    """Token ids on disk: make them from text, check them."""

    command: Annotated[
        Annotated[Prepare, subcommand("prepare")] | Annotated[Check, subcommand("check")], tyro.conf.arg(name="")
    ]


def _numbers(sidecar: Sidecar) -> str:
    return (
        f"{sidecar.documents:,} documents, {sidecar.tokens:,} tokens of {sidecar.dtype}, "
        f"{sidecar.bytes / sidecar.tokens:.3f} bytes per token"
    )
