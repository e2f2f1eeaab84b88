"""What is chosen before CUDA starts."""

import os

import pytest
import torch

from moe_dualpipe.runtime.launch import count_gpus

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize("chosen,expected", [(None, "32"), ("1", "1")])
def test_a_gpu_gets_more_queues_than_a_rank_has_streams_unless_the_user_chose(chosen, expected, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: (seen.append(os.environ.get(VARIABLE)), 3)[1])
    monkeypatch.setenv(VARIABLE, chosen or "0")
    if chosen is None:
        monkeypatch.delenv(VARIABLE)
    assert count_gpus() == 3
    assert seen == [expected]  # it is set before CUDA may start
    monkeypatch.setenv(VARIABLE, "")  # restored, whatever the function did
