import pytest
import torch


@pytest.fixture(autouse=True)
def _the_same_random_numbers_every_time():
    torch.manual_seed(0)
