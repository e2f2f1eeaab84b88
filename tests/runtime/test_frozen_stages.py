"""Pipelines in which parts of the model are frozen: trained parameters get the gradients of an unfrozen model.

Nothing that precedes the first trained parameter needs a gradient, so a first stage may have no backward at all.
"""

import pytest

from tests.support.pipelines import agrees, all_schedules_equal_reference
from tests.support.ranks import run_ranks

FIRST_HALF = r"^embedding|^layers\.[0-3]\."
ALL_BUT_THE_HEAD = r"^(?!head)"
ALL_BUT_THE_SECOND_RANKS_EXPERTS = r"^(?!.*experts\..*\.[345]$)"


@pytest.mark.parametrize("frozen", [FIRST_HALF, ALL_BUT_THE_HEAD])
@pytest.mark.long
def test_trained_parameters_of_a_partly_frozen_model_get_their_gradients(frozen):
    """With overlapped pairs, and with weight gradients deferred by a split backward."""
    names = ["zb1p", "dualpipe"]
    run_ranks(2, all_schedules_equal_reference, names, 2, frozen == ALL_BUT_THE_HEAD, frozen)


@pytest.mark.long
def test_ranks_that_share_experts_agree_on_their_transfers():
    """Before an all-to-all, something is trained on one rank and nothing on the other."""
    run_ranks(2, agrees, "dualpipev", 1, 2, 2, False, ALL_BUT_THE_SECOND_RANKS_EXPERTS)
