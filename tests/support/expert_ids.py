"""Random routing decisions for the tests of expert-parallel backends."""

import torch

KINDS = "even", "one expert", "half of the experts", "some without experts"


def random_ids(generator, tokens, k, kind, experts):
    """Expert ids [T, K] without repetition within a token; some or all are -1. k <= experts."""
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens + 1)])[:tokens]
    if kind == "one expert":
        return torch.where(torch.arange(k) == k - 1, 5, -1).expand(tokens, k)
    if kind == "half of the experts":
        return torch.where(ids < experts // 2, ids, -1)
    if kind == "some without experts":
        return torch.where(torch.rand(tokens, k, generator=generator) < 0.5, ids, -1)
    return ids
