"""Arguments that do not fit are refused in one line that names them, by the kernels and by plain torch."""

import dataclasses

import pytest
import torch

from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.grouped_gemm import grouped_linear, grouped_mm, grouped_wgrad
from moe_dualpipe.kernels.permute import gather, permute, unpermute
from moe_dualpipe.kernels.routing import expert_order, route
from tests.support.kernels import DEVICE, offsets_of


def zeros(*shape, **options):
    return torch.zeros(*shape, **{"device": DEVICE, **options})


HALF, LONG, META = {"dtype": torch.float16}, {"dtype": torch.int64}, {"device": "meta"}
ORDER = expert_order(torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]], device=DEVICE), 3)
IDS, WIDE, GRAD = zeros(3, 2, **LONG), zeros(8, 6).T, {"requires_grad": True}
REFERENCE, TRITON = {"kernels": "reference"}, {"kernels": "triton"}
OPERATORS = {
    experts: TRITON | {
        "x_ND": zeros(6, 16), "gate_up_EGD": zeros(3, 16, 16), "down_EDF": zeros(3, 16, 8), "order": ORDER,
        "weights_NK": zeros(6, 2),
    },
    grouped_wgrad: TRITON | {"dy_MO": zeros(4, 8), "x_MI": zeros(4, 6), "expert_offsets": offsets_of([3, 1])},
    grouped_mm: TRITON | {"x_MI": zeros(4, 8), "w_EOI": zeros(2, 6, 8), "expert_offsets": offsets_of([3, 1])},
    grouped_linear: TRITON | {"x_MI": zeros(4, 8), "w_EOI": zeros(2, 6, 8), "expert_offsets": offsets_of([3, 1])},
    route: TRITON | {"logits_TE": zeros(2, 8), "k": 2},
    expert_order: {"expert_ids_NK": IDS, "num_experts": 2},
    permute: TRITON | {"x_ND": zeros(6, 8), "order": ORDER},
    unpermute: TRITON | {"rows_MD": zeros(12, 8), "order": ORDER, "weights_NK": zeros(6, 2)},
    gather: TRITON | {"x_ND": zeros(6, 8), "index_M": ORDER.gather_idx_M[:6], "out_MD": zeros(6, 8)},
    linear_cross_entropy: {"x_TD": zeros(7, 5), "w_VD": zeros(31, 5), "labels_T": zeros(7, **LONG)},
}  # fmt: skip
# What is changed in the arguments above, and what is said.
REFUSED = [
    (experts, {"x_ND": zeros(5, 16)}, r"this order needs x \[6, D\]: got \[5, 16\]"),
    (experts, {"x_ND": zeros(6, 15)},
     r"x \[N, 15\] and an order of 3 experts do not match down \[E, D, F\] = \[3, 16, 8\]"),
    (experts, {"gate_up_EGD": zeros(3, 15, 16)}, r"got \[3, 15, 16\] and \[3, 16, 8\]"),
    (experts, {"gate_up_EGD": zeros(4, 16, 16), "down_EDF": zeros(4, 16, 8)}, "order of 3 experts do not match down"),
    (experts, {"weights_NK": zeros(6, 3)}, r"weights must be \[N, K\] = \[6, 2\]: got \[6, 3\]"),
    (experts, {"x_ND": zeros(6, 16, **HALF)}, r"one floating-point dtype: got torch\.float16, "),
    (experts, {"x_ND": zeros(16, 6).T}, r"with contiguous rows: got \[6, 16\] with strides \(1, 6\)"),
    (experts, {"down_EDF": zeros(3, 8, 16).mT}, r"down must be contiguous: got \[3, 16, 8\] with strides"),
    (experts, {"gate_up_EGD": zeros(3, 16, 16, **META)}, "all tensors must be on one device: got "),
    (experts, {"num_sms": 0}, "num_sms must be at least 1, or None for all: got 0"),
    (experts, {"kernels": "fast"}, "kernels must be one of auto, triton, reference: got 'fast'"),
    (experts, {"accumulate": True, "gate_up_EGD": zeros(3, 16, 16, **GRAD) * 1},
     r"adds to gate_up\.grad: gate_up must be a leaf, not computed from other tensors"),
    (experts, {
        "accumulate": True, "x_ND": zeros(6, 16, **HALF), "gate_up_EGD": zeros(3, 16, 16, **HALF, **GRAD),
        "down_EDF": zeros(3, 16, 8, **HALF),
     }, r"of gate_up is torch\.float16: set gate_up\.grad_dtype = torch\.float32"),
    (grouped_wgrad, {"dy_MO": zeros(4, 8), "x_MI": zeros(5, 6)},
     r"x \[M, I\] of the same dtype: got \[4, 8\] in torch\.float32 and \[5, 6\]"),
    (grouped_wgrad, {"x_MI": zeros(4, 6, **HALF)}, r"of the same dtype: got .* and \[4, 6\] in torch\.float16"),
    (grouped_wgrad, {"dy_MO": zeros(8, 4).T}, "dy must be .* with contiguous rows"),
    (grouped_wgrad, {"add_to": zeros(2, 6, 8)}, r"add_to must be \[2, 8, 6\]: got \[2, 6, 8\]"),
    (grouped_wgrad, {"add_to": zeros(2, 6, 8).mT}, r"add_to must be contiguous: got \[2, 8, 6\]"),
    (grouped_linear, {"w_EOI": zeros(2, 6, 8, **HALF)}, r"of the same dtype: got torch\.float32 and torch\.float16"),
    (grouped_linear, {"expert_offsets": offsets_of([3, 1, 0])}, "2 experts need 3 offsets in int32"),
    (grouped_linear, {"expert_offsets": zeros(3, **LONG)}, r"in int32: got \[3\] in torch.int64"),
    (grouped_linear, {"w_EOI": zeros(2, 8, 6).mT}, "w must be contiguous"),
    (grouped_linear, REFERENCE | {"x_MI": zeros(6, 5)}, r"got \[6, 5\] and \[2, 6, 8\]"),
    (grouped_linear, REFERENCE | {"x_MI": zeros(6)}, "x .M, I. and w .E, O, I."),
    (route, {"replay_TK": zeros(4, 2, **LONG)}, r"^replay_TK must be \[2, 2\], ids for each token: got \[4, 2\]$"),
    (route, {"k": 0}, "k must be from 1 to 8, the number of eligible experts: got 0"),
    (route, {"k": 5, "num_groups": 4, "top_groups": 2}, "k must be from 1 to 4, the number of eligible experts: got 5"),
    (route, {"num_groups": 3}, "8 experts cannot be divided evenly into 3 groups"),
    (route, {"num_groups": 4, "top_groups": 5}, "top_groups must be from 1 to 4 groups: got 5"),
    (route, {"group_score": "worst"}, "group_score must be best_two or best: got 'worst'"),
    (route, {"score": "relu"}, "score must be softmax or sigmoid: got 'relu'"),
    (route, {"bias_E": zeros(7)}, r"bias_E must be \[8\], one per expert: got \[7\]"),
    (route, {"bias_E": zeros(8, **META)}, "all tensors must be on one device"),
    (route, {"bias_E": zeros(16)[::2]}, "bias_E must be contiguous"),
    (route, {"logits_TE": zeros(8)}, r"route needs logits \[T, E\]: got \[8\]"),
    (route, {"logits_TE": zeros(4, 8).T}, r"logits_TE must be .* with contiguous rows: got \[8, 4\]"),
    (route, {"logits_TE": zeros(4, 8).double()}, r"bfloat16, float16 and float32: got torch\.float64"),
    (expert_order, {"expert_ids_NK": IDS[0]}, r"expert ids must be \[N, K\] integers: got \[2\]"),
    (expert_order, {"expert_ids_NK": IDS.float()}, r"got \[3, 2\] in torch.float32"),
    (expert_order, {"num_experts": 0}, "num_experts must be at least 1: got 0"),
    (expert_order, {"expert_ids_NK": IDS[:1, :1].expand(1 << 30, 2)}, "indices in int32: got 2,147,483,648 choices"),
    (permute, {"x_ND": zeros(5, 8)}, r"this order needs x \[6, D\]: got \[5, 8\]"),
    (permute, {"x_ND": WIDE}, r"rows must be \[rows, columns\] with contiguous rows"),
    (permute, {"x_ND": zeros(6, 8, **META)}, "all tensors must be on one device"),
    (unpermute, {"weights_NK": zeros(6, 3)}, r"weights must be \[N, K\] = \[6, 2\]: got \[6, 3\]"),
    (gather, {"out_MD": WIDE}, r"out must be \[rows, columns\] with contiguous rows"),
    (gather, {"out_MD": zeros(6, 9)}, r"out must be \[6, 8\]: got \[6, 9\]"),
    (gather, REFERENCE | {"out_MD": zeros(6, 9)}, r"out must be \[6, 8\]: got \[6, 9\]"),
    (linear_cross_entropy, {"x_TD": zeros(2, 3, 5)},
     r"x \[T, D\] and w \[V, D\]: got \[2, 3, 5\] and \[31, 5\]; flatten"),
    (linear_cross_entropy, {"w_VD": zeros(31, 4)}, r"got \[7, 5\] and \[31, 4\]"),
    (linear_cross_entropy, {"labels_T": zeros(6, **LONG)}, r"7 tokens need 7 labels in int64: got \[6\]"),
    (linear_cross_entropy, {"labels_T": zeros(7)}, r"7 labels in int64: got \[7\] in torch.float32"),
    (linear_cross_entropy, {"w_VD": zeros(31, 5).double()},
     "same floating-point dtype: got torch.float32 and torch.float64"),
    (linear_cross_entropy, {"x_TD": zeros(7, 5).int(), "w_VD": zeros(31, 5).int()}, "dtype: got torch.int32"),
    (linear_cross_entropy, {"w_VD": zeros(31, 5, **META)}, f"on one device: got {DEVICE}.*, meta and {DEVICE}"),
    (linear_cross_entropy, {"chunk_tokens": 0}, "chunk_tokens must be at least 1: got 0"),
]  # fmt: skip
if DEVICE == "cpu":  # on a GPU, a device-side assertion ends the process
    REFUSED += [
        (expert_order, options | {"expert_ids_NK": IDS + shift, "num_experts": 5, **more}, message)
        for options in (REFERENCE, TRITON)
        for shift, more, message in (
            (-2, {"num_choices": 2}, "expert ids must be from -1 to 4: got -2 to -2"),
            (5, {"num_choices": 2}, "expert ids must be from -1 to 4: got 5 to 5"),
            (-1, {}, "if -1 marks invalid choices, pass num_choices"),
        )
    ] + [
        (linear_cross_entropy, {"labels_T": torch.tensor([0, 30, -100, 0, wrong, 0, 0])}, f"a token: got {wrong}$")
        for wrong in (31, -1)
    ] + [
        (experts, {"x_ND": zeros(6, 16).bfloat16(), "gate_up_EGD": zeros(3, 16, 16).bfloat16(),
                   "down_EDF": zeros(3, 16, 8).bfloat16()}, "interpreter gives wrong results in bfloat16"),
    ]  # fmt: skip
    # The offsets of each product divide its rows.
    REFUSED += [
        (operator, REFERENCE | changed(torch.tensor(offsets, dtype=torch.int32)), message)
        for operator, changed in {
            grouped_linear: lambda offsets: {"x_MI": zeros(6, 8), "w_EOI": zeros(3, 6, 8), "expert_offsets": offsets},
            grouped_mm: lambda offsets: {"x_MI": zeros(6, 8), "w_EOI": zeros(3, 6, 8), "expert_offsets": offsets},
            grouped_wgrad: lambda offsets: {"dy_MO": zeros(6, 8), "x_MI": zeros(6, 8), "expert_offsets": offsets},
            experts: lambda offsets: {"order": dataclasses.replace(
                expert_order(torch.tensor([[0], [0], [1], [1], [2], [2]]), 3), expert_offsets=offsets),
                "weights_NK": None},
        }.items()
        for offsets, message in (
            ([0, 4, 2, 6], "offsets must not fall: expert 1 would have the rows from 4 to 2"),
            ([0, 7, 7, 6], "offsets must not fall: expert 2 would have the rows from 7 to 6"),
            ([2, 2, 4, 6], "the first offset must be 0: got 2"),
            ([0, 2, 4, 7], "the last offset must be the number of rows: got 7 of 6"),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("operator,changes,message", REFUSED)
def test_arguments_that_do_not_fit_are_refused_in_one_line(operator, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        operator(**OPERATORS[operator] | changes)
    assert "\n" not in str(error.value)


def test_the_arguments_that_are_changed_fit():
    for operator, arguments in OPERATORS.items():
        operator(**arguments)
