"""Text as a stream of bytes, and batches that are a pure function of (seed, step, rank).

Because a batch depends on nothing else, a run that resumes needs no loader state, and every pipeline rank can make the
same batch for itself: nothing but hidden states travels.

B sequences, S positions.
"""

import glob
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_OUT = 20  # one file in so many is kept for validation, or that share of the text where there are fewer files
SEPARATOR = b"\0"  # ends every document
VOCAB_SIZE = 256


def encode(text: str) -> list[int]:
    """Byte-level tokens: UTF-8."""
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """The inverse of `encode`; bytes that are not UTF-8 become the replacement character."""
    return bytes(tokens).decode(errors="replace")


@dataclass(frozen=True)
class TextData:
    """Two streams of token ids, and where they came from."""

    train: np.ndarray
    held_out: np.ndarray
    description: str

    def batch(self, seed: int, step: int, rank: int, count: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """`count` random training sequences for data-parallel rank `rank`: inputs and labels, each [B, S] int64."""
        random = np.random.Generator(np.random.Philox(key=[seed, (step << 20) + rank]))
        return _windows(self.train, random.integers(0, len(self.train) - seq_len, count), seq_len)

    def held_out_batch(self, first: int, count: int, total: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Sequences `first` to `first + count` of `total` that are spread evenly over the held-out text."""
        starts = np.linspace(0, len(self.held_out) - seq_len - 1, total).astype(np.int64)
        return _windows(self.held_out, starts[first : first + count], seq_len)


def _windows(stream: np.ndarray, starts: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(np.stack([stream[start : start + seq_len + 1] for start in starts]).astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load(source: str, seq_len: int) -> TextData:
    """Read text from a file, a folder (all text files below it), a glob, or "stdlib".

    Raises ValueError when there is nothing to read, or too little for one sequence of `seq_len`.
    """
    paths = _find(source)
    documents = [document for path in paths if (document := _read(path))]
    if not documents:
        raise ValueError(f"no text in --data {source}: {len(paths)} files, all empty or not text")
    if len(documents) >= HELD_OUT:
        held = documents[HELD_OUT // 2 :: HELD_OUT]
        kept = [document for i, document in enumerate(documents) if i % HELD_OUT != HELD_OUT // 2]
        train, held_out = _stream(kept), _stream(held)
        description = f"{len(kept)} files ({len(train) / 1e6:.1f} MB), {len(held)} held out"
    else:
        stream = _stream(documents)
        cut = len(stream) - max(len(stream) // HELD_OUT, min(seq_len + 1, len(stream) // 2))
        train, held_out = stream[:cut], stream[cut:]
        description = f"{len(documents)} files ({len(stream) / 1e6:.1f} MB), the last {len(held_out)} bytes held out"
    shortest = min(len(train), len(held_out))
    if shortest < seq_len + 1:
        raise ValueError(
            f"too little text in --data {source}: {len(train)} bytes to train on and {len(held_out)} held out, "
            f"but one sequence takes {seq_len + 1}; use more text or --seq-len {max(shortest - 1, 1)}"
        )
    return TextData(train, held_out, description)


def _find(source: str) -> list[Path]:
    if not source:
        raise ValueError('--data is empty: name a file, a folder, a glob, or "stdlib"')
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        return sorted(p for p in root.rglob("*.py") if skipped.isdisjoint(p.relative_to(root).parts))
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        below = (p for p in path.rglob("*") if p.is_file())
        return sorted(p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts))
    found = sorted(Path(match) for match in glob.glob(source, recursive=True) if Path(match).is_file())
    if not found:
        raise ValueError(f"--data {source}: no such file or folder, and no file matches it as a pattern")
    return found


def _read(path: Path) -> bytes:
    """The text of a file; nothing for one that is not text (it contains a zero byte)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    return b"" if SEPARATOR in content else content


def _stream(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(document + SEPARATOR for document in documents), dtype=np.uint8)
