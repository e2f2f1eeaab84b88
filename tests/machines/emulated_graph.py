"""A CUDA graph on CPU tensors: what runs in a capture is recorded, and a replay runs it again on the same memory.

As on a GPU, only operators and kernels are recorded, not the Python code around them. A replay reads the arguments of
the capture, by identity, and writes its results into the tensors that the capture returned. The capture itself changes
no memory that existed before. A value that the host reads must be the same in
each replay: operators for CPU tensors may read what those for GPUs do not.
"""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter


class EmulatedGraph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.written = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.save(args, kwargs)
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def save(self, args, kwargs):
        """Remember the values that a call may overwrite."""
        tensors = [getattr(leaf, "base", leaf) for leaf in tree_leaves((args, kwargs))]
        self.written += [(t, t.clone()) for t in tensors if isinstance(t, torch.Tensor)]

    @contextmanager
    def kernels(self):
        """Inside this context, also record the launches of Triton's interpreter."""
        launch = interpreter.GridExecutor.__call__

        def recorded(executor, *args, **kwargs):
            run = partial(launch, executor)
            with _disable_current_modes():
                self.save(args, kwargs)
                run(*args, **kwargs)
            self.calls.append((run, args, kwargs, None))

        with mock.patch.object(interpreter.GridExecutor, "__call__", recorded):
            yield

    @torch.no_grad()
    def restore(self):
        for tensor, value in reversed(self.written):
            tensor.copy_(value)
        self.written.clear()

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            results = tree_leaves(func(*args, **kwargs))
            for ours, result in zip(tree_leaves(out), results, strict=True):
                if not isinstance(ours, torch.Tensor):
                    assert ours == result, f"the capture read {ours} on the host, the replay {result}"
                elif ours.data_ptr() != result.data_ptr():
                    ours.copy_(result)


def capture(run):
    """In place of `moe_dualpipe.runtime.graphs.capture`."""
    run()
    graph = EmulatedGraph()
    with graph.kernels(), graph:
        result = run()
    graph.restore()
    return graph.replay, result
