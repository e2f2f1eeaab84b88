"""What the tests of the kernels share: where they run, in which dtypes, and how close is close enough."""

import contextlib

import torch

from moe_dualpipe.kernels.gpu import configs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes wrong numbers in bfloat16.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]

# Relative error, |ours - exact| / |exact| in the 2-norm, that is never too much: a few roundings to the dtype.
FLOOR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def error(ours, exact):
    ours, exact = ours.detach().double(), exact.detach().double()
    assert ours.shape == exact.shape
    norm = exact.norm()
    return float((ours - exact).norm() / norm if norm > 0 else ours.norm())


def assert_as_good_as(ours, reference, exact, dtype, what=""):
    """`ours` is as close to the fp64 result as plain torch in the same dtype, up to a factor of two."""
    allowed = max(2 * error(reference, exact), FLOOR[dtype])
    assert error(ours, exact) <= allowed, f"{what}: {error(ours, exact):.2e} where {allowed:.2e} is allowed"


def offsets_of(counts):
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()


@contextlib.contextmanager
def all_kernels(config):
    """Every product with this configuration."""
    with contextlib.ExitStack() as stack:
        for kernel in configs.KERNELS:
            stack.enter_context(configs.overriding(kernel, config))
        yield
