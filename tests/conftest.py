import os

import pytest
import torch

torch.set_num_threads(1)  # small tensors gain nothing from more, and lose a lot beside other processes
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported


SLOWEST = (
    "training", "checks", "tests", "pipeline", "inference", "gpu", "runtime", "checkpoint", "planner", "profiler",
)  # fmt: skip
"""Folders with long files, the longest first."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out the long tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark long tests, and put slow files first: at the end, no process is left with a long file.

    Of files named in the command, the order stays: a run that looks for a bug begins with those that notice it.
    """
    unknown = mark_long([item for item in items if isinstance(item, pytest.Function)])
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"no such cases to mark as quick: {unknown}")
    if config.args == config.getini("testpaths"):
        order = {name: i for i, name in enumerate(SLOWEST)}
        items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


def mark_long(items: list[pytest.Function]) -> dict[str, set[str]]:
    """Of a test with the mark quick("a", "b"), all others are long. Returns marked cases that do not exist."""
    cases: dict[str, set[str]] = {}
    for item in items:
        if (quick := item.get_closest_marker("quick")) is not None:
            cases.setdefault(item.nodeid.partition("[")[0], set(quick.args)).discard(item.callspec.id)
            if item.callspec.id not in quick.args:
                item.add_marker("long")
    return {test: ids for test, ids in cases.items() if ids}


@pytest.fixture(autouse=True)
def _the_same_random_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def s3_server():
    """A real S3 server (tests/support/object_store.py) with the bucket "bucket"."""
    from tests.support.object_store import object_store

    with object_store() as store:
        yield store


@pytest.fixture
def s3(s3_server):
    """The server, without faults, requests or files from earlier tests."""
    s3_server.reset()
    yield s3_server
    s3_server.reset()


@pytest.fixture
def refused(capsys):
    """A function that types a command which must be refused. Returns its error of one line, without its name."""
    from moe_dualpipe.cli import main

    def type_command(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1, printed
        program, kind, error = printed.err.split(": ", maxsplit=2)
        assert (program, kind) == ("moe-dualpipe", "error"), printed
        return error

    return type_command
