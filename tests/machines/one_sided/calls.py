"""The calls to a backend that the overlap engine makes."""

import torch

from moe_dualpipe.expert_parallel import Completed, Local
from tests.machines.one_sided.record import EXPERTS, TOKENS, Call
from tests.support.pairs import run_pair, stage


class CallLog(Local):
    """A backend that records the calls to it."""

    def __init__(self, calls: list[Call]):
        super().__init__(EXPERTS)
        self.calls, self.routes, self.transfers = calls, 0, 0

    def prepare(self, expert_ids_TK):
        route = super().prepare(expert_ids_TK)
        route.backend_state, self.routes = self.routes, self.routes + 1
        self.calls.append(("prepare", route.backend_state))
        return route

    def dispatch(self, x_TD, route, weights_TK=None):
        return self._start("dispatch", route, weights_TK, super().dispatch(x_TD, route, weights_TK))

    def combine(self, y_ND, route, weight_grads_NK=None):
        return self._start("combine", route, weight_grads_NK, super().combine(y_ND, route, weight_grads_NK))

    def _start(self, kind, route, weights, completed: Completed):
        number, self.transfers = self.transfers, self.transfers + 1
        self.calls.append((kind, route.backend_state, weights is not None))

        class Pending:
            def wait(self):
                if ("wait", number) not in calls:
                    calls.append(("wait", number))
                return completed.wait()

        calls = self.calls
        return Pending()


def calls_of_a_pair(layers: int) -> list[Call]:
    """A forward, then its backward while the forward of another chunk runs, then the backward of that one."""
    calls: list[Call] = []
    module = stage(layers, 0, CallLog(calls), embedding=False, head=False, num_shared_experts=0, num_experts=EXPERTS)
    x = torch.randn(1, TOKENS, 16)
    run_pair(module, module, x, x, overlapped=True, queued=True)
    return calls
