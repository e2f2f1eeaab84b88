"""One round of the transfers of a layer, with two expert-parallel backends."""

import torch


def check_round(ours, reference, ids, x, weights, grads, different=10**6):
    """Compare forward and backward of a layer, bit for bit, with the transfers of two lanes in flight.

    Expert e multiplies by e % different + 1. Rows past those of `reference` must be NaN. Returns both routes.
    """
    results = []
    for ep in (ours, reference):
        route = ep.prepare(ids)
        first = ep.dispatch(x, route, weights).wait()
        results.append((route, first))
    (route, first), (expected_route, expected) = results
    n = expected_route.num_rows
    for mine, theirs in zip((*first, route.local_ids_NK), (*expected, expected_route.local_ids_NK), strict=True):
        assert torch.equal(mine[:n], theirs)
    assert (route.local_ids_NK[n:] == -1).all() and first.x_ND[n:].isnan().all()
    assert route.num_choices == expected_route.num_choices and (route.padded or route.num_rows == n)
    transfers = []
    for ep, (route, first) in zip((ours, reference), results, strict=True):
        local_ids = route.local_ids_NK
        scales_NK = torch.where(local_ids >= 0, (local_ids + ours.local_experts.start + 1) * first.weights_NK, 0)
        factors = sum(scales_NK.split(1, dim=1))  # in this order on all devices
        if ep is ours:
            factors[n:] = scales_NK[n:] = torch.nan
        y = (first.x_ND * factors).to(x.dtype)
        # Started together, waited for in another order: the outputs and the gradients of both lanes.
        dispatched, pending = ep.dispatch(grads, route), ep.combine(y, route, scales_NK)
        combined, again = pending.wait(), dispatched.wait()
        output = ep.combine(y, route).wait()
        assert again.weights_NK is None and output.weight_grads_TK is None
        transfers.append([again.x_ND[:n], output.y_TD, *combined])
    for mine, theirs in zip(*transfers, strict=True):
        assert torch.equal(mine, theirs)
    # The dense oracle: sums over all choices of a token, without any transfer.
    factors = torch.where(ids >= 0, (ids % different + 1) * weights, 0)
    tolerance = 2e-2 if x.dtype.itemsize == 2 else 1e-5
    expected_y = x.double() * factors.double().sum(1, keepdim=True)
    torch.testing.assert_close(transfers[0][2].double(), expected_y, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(transfers[0][3], factors)
    return results[0][0], expected_route
