"""Check that all ranks read the same text.

Every rank reads the text itself and draws the same batches: the first stage takes the inputs, the last stage the
labels. If a machine has another version of a file, the labels do not match the inputs. The same holds for batches that
a program makes itself.
"""

from ..expert_parallel.gather import gather_objects
from ..messages import plural
from ..runtime.shared_errors import build_on_all_ranks
from . import GivenBatches, TextData


def check_same_text(text: TextData | GivenBatches) -> None:
    """Raise ValueError, on all ranks, unless all ranks have the same text. Collective."""
    fingerprints = gather_objects(build_on_all_ranks(text.fingerprint))
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    if others:
        given = isinstance(text, GivenBatches)
        what = "`batches`" if given else "the texts of --data"
        hint = "pass the sequences of the whole step on every rank" if given else "give every machine the same files"
        differ = (
            f"those of {plural(len(others), 'rank')} ({', '.join(map(str, others[:8]))}) differ from those of rank 0"
        )
        raise ValueError(f"{what} are not the same on all ranks: {differ}; {hint}")
