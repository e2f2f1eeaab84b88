"""Sizes of schedules to test with."""

# (name, ranks, micro-batches): the fewest micro-batches and more, one rank, odd numbers, partial units.
SIZES = [
    *(("gpipe", 1, 1), ("gpipe", 3, 4)),
    *(("1f1b", 1, 1), ("1f1b", 2, 7), ("1f1b", 3, 4), ("1f1b", 4, 4), ("1f1b", 8, 13)),
    *(("interleaved_1f1b", 1, 4), ("interleaved_1f1b", 2, 2), ("interleaved_1f1b", 3, 6), ("interleaved_1f1b", 4, 16)),
    *(("zb1p", 1, 2), ("zb1p", 2, 2), ("zb1p", 5, 6), ("zb1p", 5, 12)),
    *(("zbv", 1, 1), ("zbv", 2, 3), ("zbv", 5, 5), ("zbv", 5, 6), ("zbv", 5, 12)),
    *(("chimera", 2, 2), ("chimera", 4, 6), ("chimera", 4, 8), ("chimera", 4, 10), ("chimera", 8, 32)),
    *(("dualpipe", 2, 4), ("dualpipe", 4, 8), ("dualpipe", 4, 18), ("dualpipe", 6, 14), ("dualpipe", 16, 32)),
    *(("dualpipev", 1, 2), ("dualpipev", 1, 3), ("dualpipev", 2, 4), ("dualpipev", 3, 13), ("dualpipev", 8, 17)),
    ("dualpipev", 16, 34),
]
