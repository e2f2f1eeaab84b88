"""Helpers for tests of attention with a cache."""

import torch

from moe_dualpipe.models import KVCache


def piecewise(module, x, sizes, cache):
    with torch.no_grad():
        return torch.cat([module(piece, cache=cache) for piece in x.split(sizes, dim=1)], dim=1)


def check_that_a_cached_forward_is_the_forward(model, sequences):
    """Check a prompt, then single positions, then several at once."""
    x, cache = torch.randint(31, (sequences, 14)), KVCache()
    pieces = piecewise(model, x, [5, 1, 1, 4, 3], cache)
    assert cache.length == 14
    with torch.no_grad():
        torch.testing.assert_close(pieces, model(x), atol=1e-12, rtol=1e-12)


@torch.no_grad()
def continued(model, prompt, count, window):
    """Generate without a cache, from a forward of the window: always the likeliest token."""
    tokens, start = prompt.tolist(), 0
    for end in range(1, len(tokens) + count):
        if end - start > window:
            start = end - max(1, window // 2)
        if end < len(prompt):
            continue
        tokens.append(int(model.logits(model(torch.tensor([tokens[start:]])))[0, -1].argmax()))
    return tokens[len(prompt) :]
