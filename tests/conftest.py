import os

import pytest
import torch

torch.set_num_threads(1)  # small tensors gain nothing from more, and lose a lot beside other processes
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported


SLOWEST = ("training", "benchmarks", "runtime", "profiler", "kernels", "gpu")  # folders, slowest files first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: of two processes that take file after file, neither is left with a long one at the end."""
    order = {name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


@pytest.fixture(autouse=True)
def _the_same_random_numbers_every_time():
    torch.manual_seed(0)
