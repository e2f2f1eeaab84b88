"""Find equal documents by their hashes, 128 bits of BLAKE2b, in bounded memory.

The hashes are in a file, in the order of the documents. They are sorted a bucket at a time, chosen by their first bits:
a byte of memory for each document, and some 200 MB. That two different documents have the same hash is as likely as one
in 10^20 for a billion documents.
"""

from pathlib import Path

import numpy as np

from .files import DataFile
from .tasks import DIGEST_BYTES

BUCKET = 1 << 22  # documents sorted at a time, about
READ_BYTES = 1 << 26


def find_duplicates(path: Path) -> np.ndarray:
    """True for each document that is equal to an earlier one. path: of a file with DIGEST_BYTES for each document."""
    with DataFile(path) as file:
        duplicate_N = np.zeros(file.size // DIGEST_BYTES, bool)
        bits = max((len(duplicate_N) - 1).bit_length() - (BUCKET - 1).bit_length(), 0)
        for bucket in range(1 << bits):
            _mark(file, bucket, bits, duplicate_N)
    return duplicate_N


def _mark(file: DataFile, bucket: int, bits: int, duplicate_N: np.ndarray) -> None:
    """Mark the duplicates among the documents whose hashes start with the `bits` bits of `bucket`."""
    numbers, hashes = [], []
    for first in range(0, file.size, READ_BYTES):
        content = file.read(first, min(READ_BYTES, file.size - first))
        hash_N2 = np.frombuffer(content, ">u8").reshape(-1, 2).astype("u8")
        chosen = np.flatnonzero(hash_N2[:, 0] >> np.uint64(64 - bits) == bucket) if bits else np.arange(len(hash_N2))
        numbers.append(chosen + first // DIGEST_BYTES)
        hashes.append(hash_N2[chosen])
    if not numbers:
        return
    number_M, hash_M2 = np.concatenate(numbers), np.concatenate(hashes)
    order_M = np.lexsort((hash_M2[:, 1], hash_M2[:, 0]))  # stable: of equal documents, the first stays first
    sorted_M2 = hash_M2[order_M]
    duplicate_N[number_M[order_M[1:]]] = (sorted_M2[1:] == sorted_M2[:-1]).all(axis=1)
