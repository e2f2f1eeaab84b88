"""The backends Symmetric and CopyEngine between processes that share one GPU, which runs their contexts in turn.

A rank that does not answer is an error after 60 s, and a test whose ranks do not end fails after 100 s.
"""

import pytest
import torch

from moe_dualpipe.expert_parallel.copy_engine import CopyEngine
from moe_dualpipe.expert_parallel.symmetric import Symmetric
from tests.support.kernels import DEVICE
from tests.support.ranks import run_ranks
from tests.support.symmetric_ranks import (
    build,
    build_layer,
    forward_and_backward,
    layer_input,
    layers_agree,
    prepare,
    rounds,
)

pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU"),
    pytest.mark.skipif(torch.version.hip is not None, reason="the kernels read NVIDIA's clock"),
]
SECONDS = 100
BACKENDS = [Symmetric, CopyEngine]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_those_of_all_to_all_bit_for_bit(ranks, backend):
    run_ranks(ranks, rounds, ranks, range(4), backend, timeout=SECONDS)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_and_its_gradients_equal_those_of_all_to_all(ranks, backend):
    run_ranks(ranks, layers_agree, {}, backend, timeout=SECONDS)


def graphs(rank, backend):
    """A capture fails where the host would wait."""
    prepare(pytest.MonkeyPatch())
    ep = build(backend, slots=2)
    layer, x = build_layer(ep, rank, {})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(layer, x)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(side)
    ep.check()
    torch.distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(layer, x)
    for seed in (1, 2, 3):
        with torch.no_grad():
            x.copy_(layer_input(rank).roll(seed, 0))
        graph.replay()
        replayed = [t.clone() for t in captured]
        for ours, expected in zip(replayed, forward_and_backward(layer, x), strict=True):
            assert torch.equal(ours, expected)
    ep.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_of_a_layer_has_the_bits_of_eager_execution(backend):
    run_ranks(2, graphs, backend, timeout=SECONDS)
