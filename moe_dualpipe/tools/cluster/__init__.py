"""Check the machines of a run before it starts: what each of them has, and how fast the links between ranks are.

Facts are gathered on each rank, links are measured between ranks, and the verdicts are pure functions of both.
"""

from .check import Options, check_cluster
from .facts import Facts
from .links import LinkSpeed
from .verdicts import Problem, Report, cluster_report, find_problems

__all__ = [
    "Facts",
    "LinkSpeed",
    "Options",
    "Problem",
    "Report",
    "check_cluster",
    "cluster_report",
    "find_problems",
]
