"""Compares permute, unpermute, gather and gather_sum in Triton with plain torch."""

import pytest
import torch

from moe_dualpipe.kernels.permute import gather, gather_sum, permute, unpermute
from moe_dualpipe.kernels.routing import expert_order
from tests.support.kernels import DEVICE, DTYPES, check, error, run

pytestmark = pytest.mark.usefixtures("guards")

SIZES = [(1, 1, 1), (7, 33, 2), (61, 128, 3), (5, 2500, 2)]  # rows, columns, choices
# Of the rows, and of the routing weights, if there are any.
PATHS = [(dtype, weight_dtype) for dtype in DTYPES for weight_dtype in dict.fromkeys((None, torch.float32, dtype))]


@pytest.mark.parametrize("rows,columns,choices", SIZES)
@pytest.mark.parametrize("dtype,weight_dtype", PATHS)
def test_permute_and_unpermute_and_their_gradients(rows, columns, choices, dtype, weight_dtype):
    """Weights and gradients may have any layout."""
    ids = torch.randint(-1, 4, (rows, choices), device=DEVICE)
    order = expert_order(ids, 4, int((ids >= 0).sum()), kernels="reference")
    x, dy = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((rows, columns), (columns, rows)))
    values, weights = 3 * x[order.gather_idx_M], torch.rand(choices, rows, device=DEVICE).T.to(weight_dtype or dtype)
    permuted = run(lambda x, kernels: (permute(x, order, kernels), values), None, "triton", x)
    # Bit-identical: both add in the order of k.
    expected = [x[order.gather_idx_M], gather_sum(values, order.positions_NK, kernels="reference")]
    assert all(map(torch.equal, permuted, expected))
    function = lambda a, w, kernels: (unpermute(a, order, w if weight_dtype else None, kernels), dy.T)  # noqa: E731
    exact, reference, ours = check(function, None, dtype, values, weights)[:3]
    assert torch.equal(ours[1], reference[1])  # bit-identical, because each element is one product, rounded once
    if weight_dtype == torch.float32:  # products are widened before they are summed
        assert ours[2].dtype == torch.float32 and error(reference[2], exact[2]) < 1e-5


def test_slices_of_wider_rows_are_read_and_written_in_place():
    message = torch.arange(6 * 64, device=DEVICE, dtype=torch.float32).view(6, 64)
    out = torch.full((4, 64), -1.0, device=DEVICE)
    index = torch.tensor([5, 0, 0, 3], device=DEVICE)
    gather(message[:, 8:24], index, out[:, 16:32], "triton")
    assert torch.equal(out[:, 16:32], message[index, 8:24])
    assert (out[:, :16] == -1).all()
    assert (out[:, 32:] == -1).all()
    positions = torch.tensor([[2, -1], [0, 5]], device=DEVICE)
    y = gather_sum(message[:, 8:24], positions, kernels="triton")
    assert torch.equal(y, torch.stack([message[2, 8:24], message[0, 8:24] + message[5, 8:24]]))
