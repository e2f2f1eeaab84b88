"""Operators of a Mixture-of-Experts layer, each in plain torch and in Triton behind one autograd function.

The source and its documentation: https://pypi.org/project/moe-dualpipe, package moe_dualpipe.kernels.
"""

# In the repository, the modules of kernels/ are beside this file.
# pyright: reportMissingImports=false
from .cross_entropy import linear_cross_entropy
from .experts import experts, swiglu
from .grouped_gemm import grouped_linear, grouped_mm, grouped_wgrad
from .linear import linear
from .permute import gather, gather_sum, permute, unpermute
from .routing import ExpertOrder, expert_order, rank_order, route
from .weight_grads import WeightGrads, bind

__all__ = [
    "ExpertOrder",
    "WeightGrads",
    "bind",
    "expert_order",
    "experts",
    "gather",
    "gather_sum",
    "grouped_linear",
    "grouped_mm",
    "grouped_wgrad",
    "linear",
    "linear_cross_entropy",
    "permute",
    "rank_order",
    "route",
    "swiglu",
    "unpermute",
]
