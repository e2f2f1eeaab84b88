"""The checks of compiled products, on short texts in the form of PTX and SASS."""

import pytest

pytest.importorskip("triton")

from benchmarks.generated_code import pipeline_problems, signal_problems

PIPELINED = """
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];
$L__BB0_2:                              // =>This Loop Header: Depth=1
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];
$L__BB0_4:                              //   Parent Loop BB0_2 Depth=1
waitLoop:
	@!complete bra.uni waitLoop;
	wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r5}, %rd31, %rd32, %p16, 1, 1, 0, 0;
	wgmma.wait_group.sync.aligned 1;
	@%p1 bra 	$L__BB0_5;
	ld.global.b64 { %rd7 }, [ %rd2 + 0 ];
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r2, %r3}], [%r4];
$L__BB0_5:
	@%p24 bra 	$L__BB0_4;
	wgmma.wait_group.sync.aligned 0;
	bra.uni 	$L__BB0_2;
"""
WIDE = "ld.global.b64 { %rd7 }", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}"


def test_a_pipelined_loop_has_asynchronous_loads_and_one_group_of_products_in_flight():
    assert pipeline_problems(PIPELINED, wgmma=True) == []
    stalled = PIPELINED.replace("wait_group.sync.aligned 1", "wait_group.sync.aligned 0")
    assert pipeline_problems(stalled, wgmma=True) == ["the loop waits for all wgmma"]
    assert pipeline_problems(stalled, wgmma=False) == []
    # One operand through TMA and the other through registers: this is what a lost pipeline looks like.
    half = PIPELINED.replace(*WIDE).replace("cp.async.cg", "st")
    assert pipeline_problems(half, wgmma=True) == ["1 synchronous loads in the loop"]
    lost = half.replace("cp.async", "st")
    assert pipeline_problems(lost, wgmma=True)[0] == "no asynchronous loads in the loop"
    assert "no asynchronous loads in the loop" in pipeline_problems("", wgmma=False)


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
