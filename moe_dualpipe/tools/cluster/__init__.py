"""Check machines before a run: whether they are equal, and as fast as they should be, as are the links between them."""

from .check import CheckedRank, ClusterReport, Problem, check_cluster

__all__ = ["CheckedRank", "ClusterReport", "Problem", "check_cluster"]
