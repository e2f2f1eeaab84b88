"""The names of the transfers of experts, in layers and in traces."""

from ..overlap.labels import PREPARE, letter_of, segment_name

DISPATCH, COMBINE = "dispatch", "combine"


def is_for_experts(text: str) -> bool:
    """Whether this is the label of a dispatch or a combine, or of its setup."""
    return letter_of(text) is not None and segment_name(text) in (DISPATCH, COMBINE)


def is_exchange(text: str) -> bool:
    """Whether this is the label of a dispatch or a combine."""
    return is_for_experts(text) and not text.startswith(PREPARE)
