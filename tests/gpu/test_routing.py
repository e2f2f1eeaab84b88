"""Compares route, expert_order, rank_order and permutations in Triton with plain torch and loops."""

import pytest
import torch

from moe_dualpipe.kernels.gpu import configs, sorting
from moe_dualpipe.kernels.gpu.tiles import Tiling
from moe_dualpipe.kernels.permute import gather, gather_sum, permute, unpermute
from moe_dualpipe.kernels.routing import expert_order, rank_order, route
from tests.support.kernels import DEVICE, DTYPES, check, error, run

pytestmark = pytest.mark.usefixtures("guards")

CHOICES = {
    "softmax": {},
    "softmax, not normalized": {"normalize": False, "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "scale": 1.5},
    "sigmoid, not normalized": {"score": "sigmoid", "normalize": False},
    "groups": {"num_groups": 4, "top_groups": 2},
    "groups, sigmoid": {"score": "sigmoid", "num_groups": 4, "top_groups": 3},
    "groups by their best expert": {"num_groups": 4, "top_groups": 2, "group_score": "best"},
    "all groups": {"num_groups": 2, "top_groups": 2},
}
GIVEN = [
    {}, {"score": "sigmoid", "scale": 1.5, "num_groups": 4, "top_groups": 2}, {"normalize": False, "num_groups": 3},
]  # fmt: skip


def routed(logits, k, **options):
    """Ids, weights and the gradient of the logits, in plain torch and in Triton."""
    results = []
    for kernels in ("reference", "triton"):
        leaf = logits.detach().requires_grad_()
        weights, ids = route(leaf, k, kernels=kernels, **options)
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
        (weights * torch.linspace(-1, 2, weights.numel(), device=DEVICE).view_as(weights)).sum().backward()
        results.append((ids, weights, leaf.grad))
    return results


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens,experts,k", [(1, 4, 1), (7, 12, 3), (300, 8, 2)])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.quick(
    "softmax-7-12-3-True", "softmax, not normalized-7-12-3-False", "sigmoid-7-12-3-True",
    "sigmoid, not normalized-7-12-3-False", "groups-7-12-3-True", "groups, sigmoid-7-12-3-False",
    "groups by their best expert-7-12-3-True", "all groups-7-12-3-False", "softmax-300-8-2-False",
    "groups, sigmoid-300-8-2-True", "sigmoid-1-4-1-True",
)  # fmt: skip
def test_route_equals_the_reference(choice, tokens, experts, k, biased):
    logits = 2 * torch.randn(tokens, experts, device=DEVICE)
    bias = 0.3 * torch.randn(experts, device=DEVICE) if biased else None
    (ids, weights, grad), (our_ids, our_weights, our_grad) = routed(logits, k, bias_E=bias, **choice)
    assert torch.equal(our_ids, ids)
    torch.testing.assert_close(our_weights, weights)
    torch.testing.assert_close(our_grad, grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("choice", GIVEN, ids=str)
def test_given_experts_replace_the_choice_of_their_tokens(choice):
    """A token without given experts chooses. If a token is given what it would choose, its weights stay the same."""
    logits, bias = 2 * torch.randn(37, 12, device=DEVICE), 0.3 * torch.randn(12, device=DEVICE)
    own = routed(logits, 3, bias_E=bias, **choice)
    replay = torch.stack([torch.randperm(12)[:3] for _ in range(37)]).to(DEVICE)
    replay[::3] = -1
    expected, ours = routed(logits, 3, bias_E=bias, replay_TK=replay, **choice)
    assert torch.equal(ours[0], torch.where(replay < 0, own[0][0], replay)) and torch.equal(ours[0], expected[0])
    torch.testing.assert_close(ours[1:], expected[1:], rtol=1e-5, atol=1e-6)
    again = routed(logits, 3, bias_E=bias, replay_TK=own[0][0].contiguous(), **choice)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(again, own, strict=True))


LOGITS = {
    "groups that are not a power of two": (torch.randn(2, 504), 8, {"num_groups": 7, "top_groups": 3}),
    "large": (200 * torch.randn(6, 8), 3, {"normalize": False}),
    "half precision": ((200 * torch.randn(6, 8)).half(), 3, {"normalize": False}),
    "slices": (100 * torch.randn(6, 20)[:, 3:11], 3, {"normalize": False}),
    "scores that underflow": (torch.full((2, 4), -200.0), 2, {}),
}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", LOGITS)
def test_logits_of_any_kind(name, score):
    logits, k, options = LOGITS[name]
    reference, ours = routed(logits.to(DEVICE), k, score=score, **options)
    torch.testing.assert_close(ours, reference)
    assert name != "scores that underflow" or score == "softmax" or not (ours[1].any() or ours[2].any())


INF = torch.inf
# Scores, the number of choices, options, and the expected ids. The first scores: group 0 has the highest score, group 1
# the highest sum of two, group 2 the highest sum of three.
EXAMPLES = [
    ([0.9, 0, 0, 0.6, 0.6, 0, 0.5, 0.5, 0.5], 2, {"num_groups": 3, "top_groups": 1}, [3, 4]),
    ([0.9, 0, 0, 0.6, 0.6, 0, 0.5, 0.5, 0.5], 2, {"num_groups": 3, "top_groups": 1, "group_score": "best"}, [0, 1]),
    ([0.5] * 6, 4, {}, [0, 1, 2, 3]),  # ties go to the lower id
    ([0.2, 0.7, 0.2, 0.7, 0.2, 0.7], 4, {}, [1, 3, 5, 0]),
    ([0.5] * 6, 2, {"num_groups": 3, "top_groups": 1}, [0, 1]),
    ([0.5] * 4, 3, {"bias_E": torch.tensor([-INF, 0, -INF, -INF], device=DEVICE)}, [1, 0, 2]),  # chosen last
]


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("scores,k,options,expected", EXAMPLES)
def test_examples(scores, k, options, expected, kernels):
    logits = torch.tensor([scores] * 2, device=DEVICE).logit(eps=1e-4)
    assert route(logits, k, score="sigmoid", kernels=kernels, **options)[1].tolist() == [expected] * 2


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("broken", [float("nan"), INF, -INF])
@pytest.mark.parametrize("groups", [(1, 1), (3, 2)])
def test_ids_are_valid_for_nan_and_inf_logits(kernels, broken, groups):
    """NaN logits make the loss NaN, which is reported. An invalid id would cause reads out of bounds."""
    logits = torch.randn(5, 12, device=DEVICE)
    logits[0], logits[1, ::2], logits[2, 7] = broken, broken, broken
    for score in ("softmax", "sigmoid"):
        _, ids = route(logits, 5, score=score, num_groups=groups[0], top_groups=groups[1], kernels=kernels)
        assert ((ids >= 0) & (ids < 12)).all() and all(len(set(row)) == 5 for row in ids.tolist())


# ---- orders ----

ORDERS = {
    "random": lambda: torch.randint(0, 5, (61, 3)),
    "some invalid": lambda: torch.randint(-1, 5, (130, 3)),  # 7 blocks
    "one expert": lambda: torch.full((129, 1), 3),
    "all invalid": lambda: torch.full((4, 2), -1),
    "no rows": lambda: torch.empty(0, 2, dtype=torch.int64),
    "not contiguous": lambda: torch.randint(0, 5, (3, 61)).T,
    "one block exactly": lambda: torch.randint(0, 5, (128, 1)),
}


def assert_equal_orders(ours, expected):
    for name in ("gather_idx_M", "choice_idx_M", "positions_NK", "expert_offsets"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("dtype,programs", [(torch.int64, 1), (torch.int32, 2), (torch.int64, sorting.MAX_PROGRAMS)])
@pytest.mark.quick(
    "dtype0-1-random", "dtype1-2-some invalid", "dtype0-1-one expert", "dtype1-2-all invalid", "dtype2-256-no rows",
    "dtype2-256-not contiguous", "dtype1-2-one block exactly",
)  # fmt: skip
def test_expert_order_equals_the_reference(make, dtype, programs, monkeypatch):
    """Few programs sort several blocks each."""
    monkeypatch.setattr(sorting, "MAX_PROGRAMS", programs)
    ids = make().to(DEVICE, dtype)
    valid = int((ids >= 0).sum())
    expected = expert_order(ids, 5, valid, kernels="reference")
    for _ in range(2):
        assert_equal_orders(expert_order(ids, 5, valid, kernels="triton"), expected)
    # With an upper bound of choices, the invalid ones follow.
    whole = [expert_order(ids, 5, ids.numel(), kernels=kernels) for kernels in ("triton", "reference")]
    assert_equal_orders(*whole)
    assert sorted(whole[0].choice_idx_M.tolist()) == [*range(ids.numel())]
    for order in whole:
        assert_equal_orders(order.trimmed(), expected)


@pytest.mark.parametrize("valid", [0, 40, 130])
def test_an_order_has_the_tables_of_tiles_of_all_products(valid, monkeypatch):
    """They equal the tables that are built from the offsets, also if they are used with fewer rows."""
    monkeypatch.setattr(configs, "tile_heights", lambda _arch: (4, 8))
    ids = torch.full((65, 2), -1, device=DEVICE)
    ids.view(-1)[:valid] = torch.randint(0, 7, (valid,)).to(DEVICE)
    order = expert_order(ids, 9, ids.numel(), kernels="triton")
    for height, table in order.tile_tables.items():
        built = Tiling(order.expert_offsets, ids.numel())(height)
        assert torch.equal(table[0, 0], built[0, 0]) and torch.equal(*(t[1 : 1 + int(t[0, 0])] for t in (table, built)))
    assert [*order.tile_tables] == [4, 8] and order.trimmed().tile_tables is order.tile_tables


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize(
    "tokens,k,ranks,per_rank", [(1, 1, 1, 4), (7, 3, 2, 4), (90, 4, 4, 2), (50, 8, 3, 5), (0, 2, 2, 2)]
)
def test_rank_order_sends_a_token_once_to_each_of_its_ranks(tokens, k, ranks, per_rank, kernels):
    ids = torch.randint(-1, ranks * per_rank, (tokens, k), device=DEVICE)
    ids[3:5] = -1  # tokens without an expert
    order = rank_order(ids, per_rank, ranks, kernels)
    rows = [
        (rank, t) for rank in range(ranks) for t, row in enumerate(ids.tolist()) if rank in {i // per_rank for i in row}
    ]
    assert order.gather_idx_M[: len(rows)].tolist() == [t for _, t in rows]
    assert order.expert_offsets.diff().tolist() == [[rank for rank, _ in rows].count(rank) for rank in range(ranks)]
    for t, (row, positions) in enumerate(zip(ids.tolist(), order.positions_NK.tolist(), strict=True)):
        to = [i // per_rank for i in row]  # the first choice of each rank sends the token
        assert positions == [rows.index((r, t)) if r >= 0 and r not in to[:n] else -1 for n, r in enumerate(to)]


def test_unchecked_invalid_input_writes_nothing_out_of_bounds():
    order = expert_order(torch.tensor([[0, 9], [-7, 1]], device=DEVICE), 2, 2, "triton", check_ids=False)
    assert order.expert_offsets.tolist() == [0, 1, 2]
    assert order.positions_NK.tolist() == [[0, -1], [-1, 1]]
    for kernels in ("reference", "triton"):
        # num_choices is 3, but there are four valid choices.
        order = expert_order(torch.tensor([[0, 1], [1, 0]], device=DEVICE), 2, 3, kernels)
        assert order.positions_NK.tolist() == [[0, 2], [-1, 1]]
        assert order.gather_idx_M.tolist() == [0, 1, 0]
        assert order.expert_offsets.tolist() == [0, 2, 3]  # at most num_choices rows


# ---- Permute and unpermute ----


SIZES = [(1, 1, 1), (7, 33, 2), (61, 128, 3), (5, 2500, 2)]  # rows, columns, choices
# Of the rows, and of the routing weights, if there are any.
PATHS = [(dtype, weight_dtype) for dtype in DTYPES for weight_dtype in dict.fromkeys((None, torch.float32, dtype))]


@pytest.mark.parametrize("rows,columns,choices", SIZES)
@pytest.mark.parametrize("dtype,weight_dtype", PATHS)
@pytest.mark.quick(
    "dtype0-None-7-33-2", "dtype1-weight_dtype1-7-33-2", "dtype2-None-7-33-2", "dtype3-weight_dtype3-7-33-2",
    "dtype4-weight_dtype4-7-33-2", "dtype0-None-1-1-1", "dtype1-weight_dtype1-61-128-3",
    "dtype3-weight_dtype3-5-2500-2",
)  # fmt: skip
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
