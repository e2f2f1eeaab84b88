"""The layer on the page about expert parallelism computes what the experts of each token give, with gradients."""

import re
from pathlib import Path

import torch

from moe_dualpipe.expert_parallel import Local

PAGE = Path(__file__).parents[2] / "docs/expert_parallel.md"
TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 7, 4, 2, 6, 5


def test_the_layer_of_the_page_equals_a_sum_over_experts():
    (code,) = (block for block in re.findall("```python\n(.*?)```", PAGE.read_text(), re.S) if "def layer" in block)
    imports, layer = code.partition("backend = ")[0], code[code.index("def layer") : code.index("loss = ")]
    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    names = {"backend": Local(EXPERTS), "gate_up": gate_up, "down": down}
    exec(imports + layer, names)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    x, weights = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, TOP_K, requires_grad=True)
    gate, up = torch.einsum("td,tkfd->tkf", x, gate_up[ids]).chunk(2, dim=-1)
    expected = torch.einsum("tkf,tkdf,tk->td", torch.nn.functional.silu(gate) * up, down[ids], weights)
    actual = names["layer"](x, weights, ids)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(y.square().sum(), (x, weights)) for y in (actual, expected)]
    torch.testing.assert_close(*grads)
