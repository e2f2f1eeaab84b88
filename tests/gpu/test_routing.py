"""Compares route, expert_order and rank_order in Triton with plain torch and with loops."""

import pytest
import torch

from moe_dualpipe.kernels.gpu import configs, sorting
from moe_dualpipe.kernels.gpu.tiles import Tiling
from moe_dualpipe.kernels.routing import expert_order, rank_order, route
from tests.support.kernels import DEVICE

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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens,experts,k", [(1, 4, 1), (7, 12, 3), (300, 8, 2)])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_route_equals_the_reference(choice, tokens, experts, k, biased):
    logits = 2 * torch.randn(tokens, experts, device=DEVICE)
    bias = 0.3 * torch.randn(experts, device=DEVICE) if biased else None
    results = []
    for kernels in ("reference", "triton"):
        leaf = logits.clone().requires_grad_()
        weights, ids = route(leaf, k, bias_E=bias, kernels=kernels, **choice)
        assert weights.dtype == torch.float32
        assert ids.dtype == torch.int64
        torch.manual_seed(1)
        weights.backward(torch.randn(weights.shape).to(DEVICE))
        results.append((ids, weights, leaf.grad))
    (ids, weights, grad), (our_ids, our_weights, our_grad) = results
    assert torch.equal(our_ids, ids)
    torch.testing.assert_close(our_weights, weights)
    torch.testing.assert_close(our_grad, grad, rtol=1e-4, atol=1e-6)


def test_route_with_a_number_of_groups_that_is_not_a_power_of_two():
    logits = torch.randn(9, 504, device=DEVICE)  # 7 groups of 72
    expected = route(logits, 8, num_groups=7, top_groups=3, score="sigmoid", kernels="reference")
    ours = route(logits, 8, num_groups=7, top_groups=3, score="sigmoid", kernels="triton")
    assert torch.equal(ours[1], expected[1])
    torch.testing.assert_close(ours[0], expected[0])


def test_the_score_of_a_group_is_the_sum_of_its_two_best_or_its_best():
    # Group 0 has the highest score, group 1 the highest sum of two, group 2 the highest sum of three.
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.6, 0.6, 0.0, 0.5, 0.5, 0.5]], device=DEVICE)
    logits = scores.logit(eps=1e-4)
    for kernels in ("reference", "triton"):
        _, ids = route(logits, 2, score="sigmoid", num_groups=3, top_groups=1, kernels=kernels)
        assert ids.tolist() == [[3, 4]]
        options = {"num_groups": 3, "top_groups": 1, "group_score": "best"}
        assert route(logits, 2, score="sigmoid", kernels=kernels, **options)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_ties_go_to_the_lower_id(kernels):
    _, ids = route(torch.zeros(3, 6, device=DEVICE), 4, kernels=kernels)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    logits = torch.tensor([[0.0, 1, 0, 1, 0, 1]], device=DEVICE)
    assert route(logits, 4, kernels=kernels)[1].tolist() == [[1, 3, 5, 0]]
    _, ids = route(torch.zeros(3, 6, device=DEVICE), 2, num_groups=3, top_groups=1, kernels=kernels)
    assert ids.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_scores_that_underflow_have_zero_weight_and_gradient(kernels):
    logits = torch.full((2, 4), -200.0, device=DEVICE, requires_grad=True)
    weights, _ = route(logits, 2, score="sigmoid", kernels=kernels)
    weights.sum().backward()
    assert not weights.any()
    assert not logits.grad.any()


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("groups", [(1, 1), (3, 2)])
def test_ids_are_valid_for_nan_and_inf_logits(kernels, broken, groups):
    """NaN logits make the loss NaN, which is reported. An invalid id would cause reads out of bounds."""
    logits = torch.randn(5, 12, device=DEVICE)
    logits[0], logits[1, ::2], logits[2, 7] = broken, broken, broken
    for score in ("softmax", "sigmoid"):
        _, ids = route(logits, 5, score=score, num_groups=groups[0], top_groups=groups[1], kernels=kernels)
        assert ((ids >= 0) & (ids < 12)).all()
        assert all(len(set(row)) == 5 for row in ids.tolist())


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_experts_with_a_bias_of_minus_infinity_are_chosen_last(kernels):
    bias = torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf], device=DEVICE)
    _, ids = route(torch.zeros(2, 4, device=DEVICE), 3, bias_E=bias, kernels=kernels)
    assert ids.tolist() == [[1, 0, 2]] * 2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_may_be_slices_in_half_precision_and_large(dtype, score):
    wide = (200 * torch.randn(6, 20, device=DEVICE)).to(dtype)
    results = []
    for kernels in ("reference", "triton"):
        leaf = wide.clone().requires_grad_()
        weights, ids = route(leaf[:, 3:11], 3, score=score, normalize=False, kernels=kernels)
        (weights * torch.arange(3, device=DEVICE)).sum().backward()
        assert weights.dtype == torch.float32
        results.append([ids, weights, leaf.grad])
    torch.testing.assert_close(*results)


ORDERS = {
    "random": lambda: torch.randint(0, 5, (61, 3)),
    "some invalid": lambda: torch.randint(-1, 5, (150, 2)),
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
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_expert_order_equals_the_reference(make, dtype):
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


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_a_program_sorts_several_blocks(programs, monkeypatch):
    monkeypatch.setattr(sorting, "MAX_PROGRAMS", programs)
    ids = torch.randint(-1, 5, (130, 3), device=DEVICE)  # 7 blocks
    expected = expert_order(ids, 5, ids.numel(), kernels="reference")
    assert_equal_orders(expert_order(ids, 5, ids.numel(), kernels="triton"), expected)


@pytest.mark.parametrize("valid", [0, 40, 130])
def test_an_order_has_the_tables_of_tiles_of_all_products(valid, monkeypatch):
    """They equal the tables that are built from the offsets, also if they are used with fewer rows."""
    monkeypatch.setattr(configs, "tile_heights", lambda _arch: (4, 8))
    ids = torch.full((65, 2), -1, device=DEVICE)
    ids.view(-1)[:valid] = torch.randint(0, 7, (valid,)).to(DEVICE)
    order = expert_order(ids, 9, ids.numel(), kernels="triton")
    for height, table in order.tile_tables.items():
        built = Tiling(order.expert_offsets, ids.numel())(height)
        count = int(built[0, 0])
        assert int(table[0, 0]) == count
        assert torch.equal(table[1 : 1 + count], built[1 : 1 + count])
    assert [*order.tile_tables] == [4, 8]
    assert order.trimmed().tile_tables is order.tile_tables


@pytest.mark.parametrize(
    "tokens,k,ranks,per_rank", [(1, 1, 1, 4), (7, 3, 2, 4), (90, 4, 4, 2), (50, 8, 3, 5), (0, 2, 2, 2)]
)
def test_rank_order_sends_a_token_once_to_each_of_its_ranks(tokens, k, ranks, per_rank):
    ids = torch.randint(-1, ranks * per_rank, (tokens, k), device=DEVICE)
    ids[3:5] = -1  # tokens without an expert
    expected = [
        [t for t, row in enumerate(ids.tolist()) if rank in {i // per_rank for i in row}] for rank in range(ranks)
    ]
    sent = [t for rows in expected for t in rows]
    for kernels in ("reference", "triton"):
        order = rank_order(ids, per_rank, ranks, kernels)
        assert order.expert_offsets.diff().tolist() == [len(rows) for rows in expected]
        assert order.gather_idx_M[: len(sent)].tolist() == sent
        starts = order.expert_offsets.tolist()
        for row, positions, t in zip(ids.tolist(), order.positions_NK.tolist(), range(tokens), strict=True):
            first = [i >= 0 and i // per_rank not in {j // per_rank for j in row[:k]} for k, i in enumerate(row)]
            assert positions == [
                starts[i // per_rank] + expected[i // per_rank].index(t) if sends else -1
                for i, sends in zip(row, first, strict=True)
            ]


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


# ---- refusals ----


def routed(logits=None, k=2, **options):
    logits = torch.zeros(2, 8, device=DEVICE) if logits is None else logits
    return lambda: route(logits, k, **{"kernels": "triton"} | options)


def ordered(ids, *numbers, **options):
    return lambda: expert_order(ids, *numbers, **options)


IDS = torch.zeros(3, 2, dtype=torch.int64)
REFUSED = [
    (routed(k=0), "k must be from 1 to 8, the number of eligible experts: got 0"),
    (routed(k=5, num_groups=4, top_groups=2), "k must be from 1 to 4, the number of eligible experts: got 5"),
    (routed(num_groups=3), "8 experts cannot be divided evenly into 3 groups"),
    (routed(num_groups=4, top_groups=5), "top_groups must be from 1 to 4 groups: got 5"),
    (routed(group_score="worst"), "group_score must be best_two or best: got 'worst'"),
    (routed(score="relu"), "score must be softmax or sigmoid: got 'relu'"),
    (routed(bias_E=torch.zeros(7)), r"bias_E must be \[8\], one per expert: got \[7\]"),
    (routed(kernels="cuda"), "kernels must be one of auto, triton, reference: got 'cuda'"),
    (routed(bias_E=torch.zeros(8, device="meta")), "all tensors must be on one device"),
    (routed(torch.zeros(8, device=DEVICE)), r"route needs logits \[T, E\]: got \[8\]"),
    (routed(bias_E=torch.zeros(16, device=DEVICE)[::2]), "bias_E must be contiguous"),
    (routed(torch.zeros(4, 8, device=DEVICE).T), r"logits_TE must be .* with contiguous rows: got \[8, 4\]"),
    (routed(torch.zeros(4, 8, device=DEVICE).double()), r"bfloat16, float16 and float32: got torch\.float64"),
    (ordered(IDS[0], 2), r"expert ids must be \[N, K\] integers: got \[2\]"),
    (ordered(IDS.float(), 2), r"got \[3, 2\] in torch\.float32"),
    (ordered(IDS, 0), "num_experts must be at least 1: got 0"),
    (ordered(IDS[:1, :1].expand(1 << 30, 2), 1), "indices in int32: got 2,147,483,648 choices"),
]
if DEVICE == "cpu":  # on a GPU, a device-side assertion ends the process
    for kernels in ("reference", "triton"):
        REFUSED += [
            (ordered(IDS - 2, 5, 2, kernels=kernels), "expert ids must be from -1 to 4: got -2 to -2"),
            (ordered(IDS + 5, 5, 2, kernels=kernels), "expert ids must be from -1 to 4: got 5 to 5"),
            (ordered(IDS - 1, 5, kernels=kernels), "if -1 marks invalid choices, pass num_choices"),
        ]


@pytest.mark.parametrize("call,message", REFUSED)
def test_arguments_that_do_not_fit_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
