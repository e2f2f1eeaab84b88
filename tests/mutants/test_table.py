"""Each row of the tables of planted bugs fits the code: a row that does not would hide a hole."""

import pytest

from .table import ROOT, Mutant, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("room", sorted({mutant.room for mutant in MUTANTS}))
def test_bugs_of_a_room_can_be_planted(room: str):
    rows = [mutant for mutant in MUTANTS if mutant.room == room]
    assert len({mutant.planted() + mutant.file for mutant in rows}) == len(rows)
    assert all((ROOT / path.partition("::")[0]).exists() for mutant in rows for path in mutant.tests)


def test_a_row_that_no_longer_fits_is_refused(tmp_path):
    (tmp_path / "code.py").write_text("x = 1\ny = 1\n")
    with pytest.raises(ValueError, match=r"occurs 2 times in code\.py, not once"):
        Mutant("room", "code.py", "= 1", "= 2", "", ()).planted(tmp_path)
    with pytest.raises(SyntaxError):
        Mutant("room", "code.py", "x = 1", "x = (", "", ()).planted(tmp_path)
