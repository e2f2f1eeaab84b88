"""Runs the Gluon kernels on a CPU: their own Python code, on a model of a Hopper multiprocessor.

Triton's interpreter cannot run Gluon. Here, torch tensors replace the tensors of Gluon, and models its functions. The
warps of a kernel that run the same function are one thread of Python. One thread runs at a time; at every action, a
random generator chooses the next one. Copies finish at any time, in any order, also chosen at random.

An action that is not safe raises HazardError (hopper_orders.py), an address outside a tensor IndexError. The machine
does not know about single threads of a warp, registers, layouts or time.

The actions of a thread do not depend on the order of execution. They are recorded, so that `explore` can do them in
all orders.
"""

import math
import random
import threading
from types import SimpleNamespace

import torch

from tests.support.hopper_orders import HazardError, act, finish, new_barrier

THREADS = 128  # of a producer


class Value(torch.Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


def value(x):
    return torch.as_tensor(x).as_subclass(Value)


class Pointers:
    """Elements of a tensor in global memory."""

    def __init__(self, memory, offsets=0):
        self.memory, self.offsets = memory, torch.as_tensor(offsets)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offsets):
        return Pointers(self.memory, self.offsets + offsets)

    def __getitem__(self, index):
        return Pointers(self.memory, self.offsets[index])

    def elements(self, mask):
        """The tensor as a flat one, the offsets, and where they are valid. Raises IndexError for others."""
        flat = self.memory.as_strided((self.memory.untyped_storage().nbytes() // self.memory.element_size(),), (1,), 0)
        offsets, mask = torch.broadcast_tensors(self.offsets + self.memory.storage_offset(), torch.as_tensor(mask))
        offsets, mask = offsets.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor)
        if ((offsets < 0) | (offsets >= len(flat)))[mask].any():
            raise IndexError("an address outside its tensor")
        return flat, torch.where(mask, offsets, 0).long(), mask

    def load(self, mask=True, other=0):
        flat, offsets, inside = self.elements(mask)
        return value(torch.where(inside, flat[offsets], torch.as_tensor(other, dtype=flat.dtype)))

    def store(self, x, mask=True):
        flat, offsets, inside = self.elements(mask)
        flat[offsets[inside]] = torch.as_tensor(x).broadcast_to(offsets.shape)[inside].as_subclass(torch.Tensor)


class Descriptor:
    """A TMA descriptor, in a kernel."""

    def __init__(self, host):
        self.pointers, self.shape, self.strides = Pointers(host.base), host.shape, host.strides
        self.block_shape, self.layout, self.dtype = list(host.block_shape), host.layout, host.base.dtype
        self.block_type = SimpleNamespace(nbytes=math.prod(self.block_shape) * host.base.element_size())

    def box(self, coordinates):
        """Pointers to the elements of a tile, and which are in bounds."""
        offsets, inside = torch.zeros(()).long(), torch.ones(()).bool()
        for start, size, stride, length in zip(coordinates, self.shape, self.strides, self.block_shape, strict=True):
            i = torch.arange(length) + int(start)
            offsets = offsets[..., None] + i * stride  # wraps at 2^64, as addresses do
            inside = inside[..., None] & (i >= 0) & (i < size)
        return self.pointers + offsets, inside


class Shared:
    """A buffer in shared memory, or a part of it. key: the number of the allocation, and of the buffer in it."""

    def __init__(self, machine, data, key):
        self.machine, self.data, self.key = machine, data, key
        self.shape, self.dtype, self.numel = list(data.shape), data.dtype, data.numel()

    def index(self, i):
        return Shared(self.machine, self.data[int(i)], (*self.key, int(i)))

    def _view(self, data):
        return Shared(self.machine, data, self.key)

    def reshape(self, shape):
        return self._view(self.data.view([int(n) for n in shape]))

    def permute(self, order):
        return self._view(self.data.permute(order))

    def slice(self, start, length, dim=0):
        return self._view(self.data.narrow(dim, start, length))

    def load(self, layout):
        self.machine.do("read", self.key)
        return value(self.data.clone())

    def store(self, x):
        self.machine.do("write", self.key)
        self.data.copy_(x)


class Barriers:
    """Barriers in shared memory. A barrier is its number."""

    def __init__(self, numbers):
        self.index = lambda i: numbers[int(i)]


class Machine:
    """One multiprocessor, which runs the programs of a kernel one after another.

    runs: for each program, the actions of each thread, and the number of arrivals that each barrier counts.
    """

    def __init__(self, seed=0):
        self.random, self.turn, self.runs = random.Random(seed), threading.Condition(), []

    def run(self, kernel, grid, *arguments):
        self.num_programs = grid[0]
        arguments = [Descriptor(x) if hasattr(x, "block_shape") else x for x in arguments]
        arguments = [Pointers(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        for program in range(self.num_programs):
            self.program = program
            self.allocations, self.barriers, self.buffers, self.copies, self.threads = 0, [], {}, [], []
            kernel(*arguments)

    # ---- threads ----

    def warp_specialize(self, functions, num_warps, num_registers):
        assert len(functions) == len(num_warps) + 1 == len(num_registers) + 1
        self.threads = [
            SimpleNamespace(can_go_on=lambda: True, done=False, actions=[], multiply=[], store=[], copies=[])
            for _ in functions
        ]
        self.runs.append(([thread.actions for thread in self.threads], [barrier.count for barrier in self.barriers]))
        self.error = self.running = None
        workers = [
            threading.Thread(target=self._work, args=(state, function, arguments), daemon=True)
            for state, (function, arguments) in zip(self.threads, functions, strict=True)
        ]
        for worker in workers:
            worker.start()
        with self.turn:
            self._choose()
        for worker in workers:
            worker.join()
        if self.error:
            raise self.error
        assert not self.copies, "a copy that nobody waits for"

    def _work(self, state, function, arguments):
        try:
            with self.turn:
                self._wait_until_chosen(state)
            function(*arguments)
            state.done = True
            with self.turn:
                self._choose()
        except Exception as error:
            with self.turn:
                self.error = self.error or error
                self.turn.notify_all()

    def _wait_until_chosen(self, state):
        self.turn.wait_for(lambda: self.running is state or self.error)
        if self.error:
            raise self.error

    def _choose(self):
        """Let some copies finish, then choose a thread that can go on."""
        while True:
            ready = [state for state in self.threads if not state.done and state.can_go_on()]
            if self.copies and (not ready or self.random.random() < 0.3):
                copy, write = self.copies.pop(self.random.randrange(len(self.copies)))
                write()
                finish(copy, self.barriers, self.buffers)
                continue
            if not ready and not all(state.done for state in self.threads):
                raise HazardError("deadlock")
            self.running = self.random.choice(ready) if ready else None
            return self.turn.notify_all()

    def do(self, *action, write=None, can_go_on=lambda: True):
        """Do an action of the running thread once it can go on. write: the effect of the copy that it starts."""
        state, started = self.running, []
        state.actions.append(action)
        with self.turn:
            state.can_go_on = can_go_on
            self._choose()
            self._wait_until_chosen(state)
            state.can_go_on = lambda: True
        act(action, self.barriers, self.buffers, started)
        self.copies += [(copy, write) for copy in started]
        if action[0] in ("multiply", "store"):
            getattr(state, action[0]).append(action[1:])

    def finish_reads(self, kind, pending):
        """Wait until at most `pending` products or stores of the running thread may still read their buffers."""
        queue = getattr(self.running, kind)
        finished = [queue.pop(0) for _ in range(len(queue) - pending)]
        self.do("finished", *(key for keys in finished for key in keys))

    # ---- Gluon's operations ----

    def allocate(self, dtype, shape, layout):
        shape = [int(n) for n in shape]
        if dtype == torch.int64:
            self.barriers += [new_barrier(0)] * shape[0]
            return Barriers(range(len(self.barriers))[-shape[0] :])
        self.allocations += 1
        return Shared(self, torch.full(shape, math.nan, dtype=dtype), (self.allocations,))

    def init(self, barrier, count):
        self.barriers[barrier] = new_barrier(int(getattr(count, "value", count)))

    def wait(self, barrier, phase):
        phase = int(phase)
        self.do("wait", barrier, phase, can_go_on=lambda: self.barriers[barrier].is_over(phase))

    def arrive(self, barrier, *, count=1, pred=True):
        assert count == 1
        if pred:
            self.do("arrive", barrier)

    def fence(self):
        if self.threads:  # else: a fence between the barriers and the threads
            self.do("fence")

    def load(self, descriptor, coordinates, barrier, result):
        assert result.shape == descriptor.block_shape
        pointers, inside = descriptor.box(coordinates)

        def write():
            result.data.copy_(pointers.load(inside))

        self.do("load", result.key, barrier, descriptor.block_type.nbytes, write=write)
        result.data.fill_(math.nan)

    def copy(self, result, pointers, mask=True):
        self.do("copy", result.key)
        result.data.fill_(math.nan)
        self.running.copies.append((result, pointers, mask))

    def arrive_after_copies(self, barrier, increment_count):
        assert not increment_count
        copies, self.running.copies = self.running.copies, []

        def write():
            for result, pointers, mask in copies:
                result.data.copy_(pointers.load(mask))

        self.do("copies arrive", barrier, THREADS, tuple(result.key for result, *_ in copies), write=write)

    def save(self, descriptor, coordinates, source):
        assert source.shape == descriptor.block_shape
        self.do("store", source.key)
        pointers, inside = descriptor.box(coordinates)
        pointers.store(source.data, inside)

    def multiply(self, a, b, acc, is_async):
        assert is_async
        self.do("multiply", a.key, b.key)
        return acc + value(a.data.float() @ b.data.float())

    def finish_products(self, pending, deps):
        self.finish_reads("multiply", pending)
        return deps[0]


# ---- Gluon's functions ----


def gluon(machine):
    """Models of Gluon's functions, by the names under which the kernels import them."""

    gl = SimpleNamespace(
        int64=torch.int64, float32=torch.float32, constexpr=lambda x: x, static_range=range,
        SliceLayout=lambda *_: None, NVMMADistributedLayout=lambda *_: None,
        program_id=lambda _axis: machine.program, num_programs=lambda _axis: machine.num_programs,
        load=lambda p, mask=True, other=0: p.load(mask, other), store=lambda p, x, mask=True: p.store(x, mask),
        arange=lambda start, end, _layout=None: value(torch.arange(start, end)),
        zeros=lambda shape, dtype, _layout: value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, _layout: value(torch.full(shape, x, dtype=dtype)),
        zeros_like=torch.zeros_like, exp=torch.exp, sum=lambda x, axis: x.sum(axis), split=lambda x: x.unbind(-1),
        reshape=torch.reshape, permute=torch.permute,
        minimum=lambda a, b: torch.minimum(value(a), value(b)), maximum=lambda a, b: torch.maximum(value(a), value(b)),
        allocate_shared_memory=machine.allocate, warp_specialize=machine.warp_specialize,
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None, init=machine.init, wait=machine.wait, arrive=machine.arrive,
        expect=lambda barrier, size: machine.do("expect", barrier, size),
    )  # fmt: skip
    tma = SimpleNamespace(
        async_copy_global_to_shared=machine.load, async_copy_shared_to_global=machine.save,
        store_wait=lambda pending: machine.finish_reads("store", pending),
    )  # fmt: skip
    async_copy = SimpleNamespace(async_copy_global_to_shared=machine.copy, mbarrier_arrive=machine.arrive_after_copies)
    return {
        "gl": gl, "tl": gl, "mbarrier": mbarrier, "tma": tma, "async_copy": async_copy,
        "fence_async_shared": machine.fence, "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.finish_products,
        "range": lambda *bounds: (value(i) for i in range(*map(int, bounds))),
    }  # fmt: skip
