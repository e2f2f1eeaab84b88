"""The colors of lanes.

If phases have this project's letters, (F), (B), (I) and (W), a color shows the letter. In all other traces, a color
shows the category of a kernel (../categories.py). Most colors are of Paul Tol's scheme "light" for computation,
which was made for black text, and of his "vibrant" for communication: both can be told apart by people who are
color-blind (https://personal.sron.nl/~pault/). "light" has too few colors: rarer categories have others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....overlap.labels import letter_of
from ...drawing.timeline_boxes import COLORS, LABELS
from ..lanes import COMMUNICATION, COPIES, Ints, Lanes


@dataclass(frozen=True, slots=True)
class Style:
    """A color with its entry in the legend. ink: the color of text on it."""

    label: str
    color: str
    ink: str = "#111111"


OTHER = Style("other", "#cccccc")
EXPOSED, HIDDEN = (
    Style("exposed communication", "#cc3311", "#ffffff"),
    Style("hidden communication", "#0077bb", "#ffffff"),
)
COPY = Style("copies", "#ee8866")
LETTERS = tuple(Style(LABELS[letter], color) for letter, color in COLORS.items())
_BY_CATEGORY = {
    "GEMM": "#77aadd", "grouped GEMM": "#99ddff", "attention": "#44bb99", "convolution": "#7788cc",
    "normalization": "#bbcc33", "softmax and loss": "#88cc77", "elementwise": "#eedd88", "reduction": "#aaaa00",
    "routing": "#ffaabb", "embedding": "#cc99cc", "optimizer": "#bb8899", "data movement": "#ccaa88",
}  # fmt: skip
CATEGORY_STYLES = tuple(Style(category, color) for category, color in _BY_CATEGORY.items())
STYLES = (*LETTERS, *CATEGORY_STYLES, OTHER, HIDDEN, COPY, EXPOSED)
"""In the order of the legend."""
_NUMBER = {style: number for number, style in enumerate(STYLES)}


def has_letters(pictures: Sequence[Lanes]) -> bool:
    """Whether phases have this project's letters."""
    return any(letter_of(phase) for lanes in pictures for phase in {*lanes.phases})


def styles_of(lanes: Lanes, letters: bool) -> Ints:
    """Return the index in STYLES of each event. Communication without a letter is hidden where it is not exposed."""
    if letters:
        by_letter = dict(zip(COLORS, LETTERS, strict=True))
        known = [by_letter.get(letter_of(phase) or "", OTHER) for phase in lanes.phases]
        return _numbers([*known, OTHER])[lanes.phase]  # the index -1 is the last entry
    by_category = {style.label: style for style in CATEGORY_STYLES}
    found = _numbers([by_category.get(category, OTHER) for category in lanes.categories] or [OTHER])[lanes.category]
    return np.where(lanes.lane == COMMUNICATION, _NUMBER[HIDDEN], np.where(lanes.lane == COPIES, _NUMBER[COPY], found))


def _numbers(styles: Sequence[Style]) -> NDArray[np.int64]:
    return np.array([_NUMBER[style] for style in styles], dtype=np.int64)
