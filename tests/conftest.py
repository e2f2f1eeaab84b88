import os

import pytest
import torch

torch.set_num_threads(1)  # small tensors gain nothing from more, and lose a lot beside other processes
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported


@pytest.fixture(autouse=True)
def _the_same_random_numbers_every_time():
    torch.manual_seed(0)
