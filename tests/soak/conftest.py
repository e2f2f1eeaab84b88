"""Random attacks. Each try of a test has its own random numbers.

make soak                                                              all tries, beside the long tests
SOAK_SEED=7 .venv/bin/python -m pytest -m long tests/soak              other random numbers
.venv/bin/python -m pytest -m long tests/soak -k "killed and 17"       one try again
"""

import os
import random

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("long")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The random numbers of a try. Parametrize it, indirectly, with the numbers of the tries."""
    return random.Random(f"{os.environ.get('SOAK_SEED', '0')}/{request.node.name}")
