"""One round of the transfers of a layer, with two expert-parallel backends."""

import torch


def check_round(ours, reference, ids, x, weights, grads):
    """Compare forward and backward of a layer, bit for bit, with the transfers of two lanes in flight.

    Rows past those of `reference` must be NaN. Returns both routes.
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
    return results[0][0], expected_route
