"""The check of signals in compiled kernels, on a short text in the form of PTX."""

import pytest

pytest.importorskip("triton")

from benchmarks.generated_code import signal_problems

SIGNALS = """
	mov.u64 %rd14, %globaltimer;
	shfl.sync.bfly.b32 	%r59, %r58, 16, 31, -1;
	bar.sync 	0;
	@%p6 bra 	$L__BB0_4;
	@%p23 atom.global.acq_rel.gpu.cas.b32 %r19, [ %rd13 + 0 ], %r20, %r21;
	st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
	bar.sync 	0;
	@%p23 atom.global.sys.acq_rel.add.u32 %r57, [ %rd51 + 0 ], %r58;
	bar.sync 	0;
	@%p4 atom.global.sys.release.exch.b32 %r9, [ %rd6 + 0 ], %r10;
	st.global.b32 [ %rd3 + 0 ], { %r10 };
"""


def test_a_release_needs_a_barrier_and_a_wait_one_clock():
    assert signal_problems(SIGNALS) == []
    first, clock, *others = SIGNALS.split("bar.sync")
    unordered = ["a release without a barrier before it"]
    assert signal_problems("bar.sync".join([first, clock]) + "".join(others)) == unordered
    assert signal_problems("bar.sync".join([first, clock, others[0] + others[1]])) == unordered
    assert signal_problems("bar.sync".join([first + clock, *others])) == ["threads may leave a wait at different times"]
