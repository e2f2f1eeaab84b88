"""All ranks must have the same text, because the first stage takes the inputs from it and the last one the labels."""

import numpy as np

from moe_dualpipe.data import load_data, prepare_data
from moe_dualpipe.data.same_text import check_same_text
from tests.support.ranks import run_ranks

TEXT = "".join(f"line {i}\n" for i in range(400))


def compared(rank, cases):
    """What each case says, in which every rank has one of its sources."""
    said = []
    for sources in cases:
        try:
            check_same_text(load_data(sources[rank], 8))
            said.append("same")
        except ValueError as error:
            said.append(str(error).partition(": ")[2].partition(";")[0])
    return said


def test_the_text_counts_and_its_place_does_not(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "d").write_text(TEXT[:-1])
    prepare_data([str(tmp_path / "a")], tmp_path / "tokens", "bytes", 1, "text")
    tokens = np.fromfile(tmp_path / "tokens" / "train.bin", np.uint8)
    tokens.tofile(tmp_path / "bare.bin")
    a, b, d, bare = ([str(tmp_path / name)] for name in ("a", "b", "d", "bare.bin"))
    twice = [f"{a[0]}=2", *d]
    cases = [
        [a, b, a], [a, d, d], [[*a, *d], [*d, *a], [*b, *d]],
        [twice, [f"{b[0]}=2", *d], twice], [twice, [*b, *d], twice],
    ]  # fmt: skip
    one = "those of 1 rank (1) differ from those of rank 0"
    two = "those of 2 ranks (1, 2) differ from those of rank 0"
    assert run_ranks(3, compared, cases) == [["same", two, one, "same", one]] * 3
    before = load_data(bare, 8, dtype="uint8")
    assert before.fingerprint() == load_data(bare, 8, dtype="uint8").fingerprint() > 0
    tokens[0] += 1
    (tmp_path / "new").write_bytes(tokens.tobytes())
    (tmp_path / "new").replace(bare[0])
    assert load_data(bare, 8, dtype="uint8").fingerprint() != before.fingerprint()
