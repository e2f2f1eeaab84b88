"""Transfers: bytes against counts of simulated tokens, and the slower of two links."""

import random

import pytest

from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.transfer_times import gather, rows_sent, seconds

H100 = load_device("h100")


def simulated(experts, top_k, ep, domain, backend, groups=1, top_groups=1, tokens=4000):
    """Rows of a token that leave its rank 0, counted on random choices: within the fast domain, and beyond it."""
    rng, each, in_group, near, far = random.Random(0), experts // ep, experts // groups, 0, 0
    for _ in range(tokens):
        chosen = rng.sample(range(groups), top_groups)
        choices = [group * in_group + index for group in chosen for index in range(in_group)]
        ranks = [expert // each for expert in rng.sample(choices, top_k)]
        if backend == "all_to_all":
            near += sum(0 < rank < domain for rank in ranks)
            far += sum(rank >= domain for rank in ranks)
        else:
            near += len({rank for rank in ranks if rank != 0})  # also those that another domain forwards
            far += len({rank // domain for rank in ranks} - {0})
    return near / tokens, far / tokens


# One group, then: a group is a domain, several domains, half a domain, a rank, and a part of a rank.
CASES = [
    (64, 8, 16, 8, 1, 1), (8, 2, 8, 4, 1, 1), (16, 2, 4, 2, 1, 1), (256, 8, 64, 8, 8, 4), (64, 6, 32, 4, 4, 2),
    (64, 6, 32, 16, 4, 2), (64, 4, 16, 4, 16, 3), (64, 4, 8, 4, 32, 6), (64, 8, 8, 8, 1, 1), (64, 8, 1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["all_to_all", "deepep"])
@pytest.mark.parametrize("experts,top_k,ep,domain,groups,top_groups", CASES)
def test_rows_equal_those_of_random_choices(experts, top_k, ep, domain, groups, top_groups, backend):
    rows = rows_sent(experts, top_k, ep, domain, backend, groups, top_groups)
    expected = simulated(experts, top_k, ep, domain, backend, groups, top_groups)
    assert (rows.near, rows.far) == pytest.approx(expected, rel=0.05, abs=0.03)
    if groups > 1:
        free = rows_sent(experts, top_k, ep, domain, backend)
        assert (rows.far < free.far) == (rows.near < free.near) == (backend == "deepep")


def test_groups_across_domains_do_not_count():
    assert rows_sent(96, 8, 16, 4, "deepep", 3, 1) == rows_sent(96, 8, 16, 4, "deepep")


def test_a_group_has_a_ring_through_each_card_of_a_domain():
    inside, beyond, far = (gather(H100, 1e9, 8, distance) for distance in (1, 2, 8))
    assert inside == seconds(H100.domain, 1e9 * 7 / 8)
    assert beyond == seconds(H100.network, 1e9 * 7 / 8 / 4) > seconds(H100.domain, 1e9 * 7 / 8)  # 4 in each domain
    assert far == seconds(H100.network, 1e9 * 7 / 8) == gather(H100, 1e9, 8, 16)  # one in each
    sent = 1e9 * 63 / 64
    assert gather(H100, 1e9, 64, 1) == max(seconds(H100.domain, sent), seconds(H100.network, sent / 8))
    assert gather(H100, 1e9, 1, 1) == gather(H100, 0, 8, 1) == 0
