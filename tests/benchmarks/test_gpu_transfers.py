"""The benchmark of one-sided transfers, on a CPU in Triton's interpreter, and the report of its results."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import transfers
from benchmarks.gpu.context import Context
from benchmarks.gpu.goals import dispatch_share
from benchmarks.gpu.report import transfers_section
from moe_dualpipe.kernels.gpu import receive
from tests.machines.interpreter import call_directly


def measured(folder):
    context = Context(
        device=torch.device("cpu"), smoke=True, out=folder, implementations=(), tuning_shapes=0, training_seconds=0,
        deadline=0.0,
    )  # fmt: skip
    record = {}
    transfers.run(context, record)
    return record


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_both_operations_are_timed_if_they_are_correct(tmp_path, monkeypatch):
    call_directly(monkeypatch)
    record = measured(tmp_path)
    for name in ("dispatch", "combine"):
        assert [*record[name]] == ["1", "2"]
        for outcome in record[name].values():
            assert (outcome["status"], outcome["unit"]) == ("timed", "GB/s")
            assert outcome["share"] == outcome["median"] / record["copy"]["median"]
    assert dispatch_share({"transfers": record}) is None  # other sizes than those of the goal
    correct = receive.receive_rows
    monkeypatch.setattr(receive, "receive_rows", lambda *args: correct(*args) or args[2][-1:].zero_())
    monkeypatch.setattr(transfers, "SMOKE_SIZES", transfers.Sizes(2, 8, 2, 2, 2))
    wrong = measured(tmp_path)
    assert {outcome["status"] for outcome in wrong["dispatch"].values()} == {"wrong"}
    assert "- other rows than expected" in transfers_section(wrong)
