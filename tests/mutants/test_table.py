"""Each row of the tables of planted bugs fits the code: a row that does not would hide a hole."""

import pytest

from .table import ROOT, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("room", sorted({mutant.room for mutant in MUTANTS}))
def test_bugs_of_a_room_can_be_planted(room: str):
    rows = [mutant for mutant in MUTANTS if mutant.room == room]
    assert len({mutant.planted() + mutant.file for mutant in rows}) == len(rows)
    assert all((ROOT / path.partition("::")[0]).exists() for mutant in rows for path in mutant.tests)
