"""Check machines before a run: whether they are complete and equal, and whether the links between ranks are fast."""

from .check import Problem, RankFacts, Report, check_cluster

__all__ = ["Problem", "RankFacts", "Report", "check_cluster"]
