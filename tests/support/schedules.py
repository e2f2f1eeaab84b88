"""Sizes and costs of schedules, as examples and as strategies of hypothesis."""

from hypothesis import strategies as st

from moe_dualpipe.schedule import NAMES, Costs

# (name, ranks, micro-batches): the fewest micro-batches and more, one rank, odd numbers, partial units.
SIZES = [
    *(("gpipe", 1, 1), ("gpipe", 3, 4)),
    *(("1f1b", 1, 1), ("1f1b", 2, 7), ("1f1b", 3, 4), ("1f1b", 4, 4), ("1f1b", 8, 13)),
    *(("interleaved_1f1b", 1, 4), ("interleaved_1f1b", 2, 2), ("interleaved_1f1b", 3, 6), ("interleaved_1f1b", 4, 16)),
    *(("1f1b_overlap", 1, 1), ("1f1b_overlap", 3, 4), ("1f1b_overlap", 4, 13)),
    *(("interleaved_overlap", 1, 4), ("interleaved_overlap", 3, 6), ("interleaved_overlap", 4, 16)),
    *(("zb1p", 1, 2), ("zb1p", 2, 2), ("zb1p", 5, 6), ("zb1p", 5, 12)),
    *(("zbv", 1, 1), ("zbv", 2, 3), ("zbv", 5, 5), ("zbv", 5, 6), ("zbv", 5, 12)),
    *(("chimera", 2, 2), ("chimera", 4, 6), ("chimera", 4, 8), ("chimera", 4, 10), ("chimera", 8, 32)),
    *(("dualpipe", 2, 4), ("dualpipe", 4, 8), ("dualpipe", 4, 18), ("dualpipe", 6, 14), ("dualpipe", 16, 32)),
    *(("dualpipev", 1, 2), ("dualpipev", 1, 3), ("dualpipev", 2, 4), ("dualpipev", 3, 13), ("dualpipev", 8, 17)),
    ("dualpipev", 16, 34),
]


@st.composite
def sizes(draw, names=NAMES, most_ranks=6):
    """Valid (name, ranks, micro-batches)."""
    name, ranks = draw(st.sampled_from(names)), draw(st.integers(1, most_ranks))
    if name in ("chimera", "dualpipe"):
        ranks += ranks % 2
    least = 2 * ranks if "dual" in name else ranks
    step = {"chimera": 2, "dualpipe": 2, "interleaved_1f1b": ranks, "interleaved_overlap": ranks}.get(name, 1)
    return name, ranks, least + step * draw(st.integers(0, 2 * ranks))


small = st.integers(1, 9)


@st.composite
def costs(draw):
    """Random F, B, W and FB with max(F, B) <= FB <= F + B."""
    f, i, w = draw(small), draw(small), draw(small)
    return Costs(f, i + w, w, draw(st.integers(max(f, i + w), f + i + w)))
