"""A machine with an H100 and little else, pretended on a CPU.

`hide_packages` lets imports fail that a GPU machine may lack. `install` makes torch believe in a GPU: tensors are on
the CPU, but carry the device that they would have. An operator that mixes devices raises, as does a kernel with a
tensor of the CPU, and whatever makes the host wait in `graph`, where CUDA graphs are captured. Kernels run in Triton's
interpreter. Nothing is asynchronous, and a replayed graph does nothing.

    TRITON_INTERPRET=1 python -m tests.machines.gpu_machine collect          the tests for a GPU
    TRITON_INTERPRET=1 python -m tests.machines.gpu_machine suite FOLDER     tests/support/gpu_suite.py
"""

import re
import sys
import time
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

PACKAGES = "torch", "triton", "einops", "numpy", "pytest", "matplotlib"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GPU = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=85_017_624_576,
    shared_memory_per_block_optin=232_448, L2_cache_size=50 * 2**20, uuid="pretended", gcnArchName="",
)  # fmt: skip
READ = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "bincount", "equal"}
MIXED = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "set_", "lift_fresh", "detach"}
LIKE = "empty_like", "zeros_like", "ones_like", "full_like", "randn_like", "rand_like"
NEW = "tensor", "as_tensor", "arange", "empty", "zeros", "ones", "full", "randn", "rand", "randint", "randperm"
METHODS = "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"
state = SimpleNamespace(on_gpu={}, target=None, inside_kernel=False, capturing=False, streams=[])
"""on_gpu: storages by address, weakly. target: whether the tensor being made is on the GPU; None: as its inputs."""


def hide_packages() -> None:
    """Let `import` fail for all installed packages except PACKAGES and what these need."""

    plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()  # noqa: E731
    needed = [*PACKAGES]
    for name in needed:  # it grows
        with suppress(metadata.PackageNotFoundError):
            needs = [need for need in metadata.requires(name) or () if "extra ==" not in need]
            needed += {plain(re.split(r"[^\w.-]", need, maxsplit=1)[0]) for need in needs} - {*needed}
    owners = metadata.packages_distributions()
    hidden = {module for module, names in owners.items() if not {*needed} & {*map(plain, names)}}
    sys.modules.update(dict.fromkeys(hidden - {"moe_dualpipe"}))  # type: ignore[arg-type]


def is_on_gpu(t: Tensor) -> bool:
    found = (
        None if state.inside_kernel or real_device(t).type == "meta" else state.on_gpu.get(t.untyped_storage()._cdata)
    )
    return found is not None and not found.expired()


real_device: Any = Tensor.device.__get__  # type: ignore[attr-defined]
real_to: Any = Tensor.to


def put(t: Tensor, on_gpu: bool) -> Tensor:
    storage = t.untyped_storage()
    state.on_gpu.pop(storage._cdata, None)
    if on_gpu:
        state.on_gpu[storage._cdata] = StorageWeakRef(storage)
    return t


@contextmanager
def making(on_gpu: bool | None):
    before, state.target = state.target, on_gpu
    try:
        yield
    finally:
        state.target = before


def host_waits(what: str) -> None:
    if state.capturing:
        raise RuntimeError(f"the host waits: {what}")


class Devices(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = (
            func.overloadpacket.__name__,
            {**(kwargs or {}), **({"pin_memory": False} if "pin_memory" in (kwargs or {}) else {})},
        )
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = [is_on_gpu(t) for t in inputs]
        if (name in READ and any(places)) or (name == "copy_" and places == [False, True]):
            host_waits(name)
        on_cpu = [tuple(t.shape) for t, on_gpu in zip(inputs, places, strict=True) if t.dim() and not on_gpu]
        if any(places) and on_cpu and name not in READ | MIXED:
            raise RuntimeError(f"{func}: tensors on cuda and, {on_cpu}, on cpu")
        out, known = (
            func(*args, **kwargs),
            {t.untyped_storage()._cdata for t in inputs if real_device(t).type != "meta"},
        )
        target = state.target if state.target is not None else places[0] if name.startswith("index") else any(places)
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and real_device(t).type == "cpu" and t.untyped_storage()._cdata not in known:
                put(t, target)
        return out


def wanted(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


def factory(real: Any, like: bool) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        device, source = kwargs.get("device"), args[0] if args and isinstance(args[0], Tensor) else None
        if device is not None and not isinstance(device, int) and torch.device(device).type == "meta":
            return real(*args, **kwargs)
        on_gpu = wanted(device) if device is not None else source is not None and like and is_on_gpu(source)
        with making(on_gpu):
            out = real(*args, **kwargs | ({"device": CPU} if device is not None else {}))
            return out if real_device(out).type == "meta" or out is source else put(out, on_gpu)

    return call


def move(t: Tensor, on_gpu: bool, queued: bool = False) -> Tensor:
    if is_on_gpu(t) == on_gpu or real_device(t).type == "meta":
        return t
    if not (queued and getattr(t, "pinned", False)):
        host_waits("a copy to or from memory that is not pinned")
    with making(on_gpu):
        return t.clone()


def to(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device = next((a for a in args if isinstance(a, torch.device | str)), kwargs.get("device"))
    if isinstance(args[0] if args else None, Tensor):
        device, args = args[0].device, (args[0].dtype, *args[1:])
    rest = [a for a in args if isinstance(a, torch.dtype)]
    more = {key: value for key, value in kwargs.items() if key in ("dtype", "copy", "memory_format")}
    if device is not None and torch.device(device).type == "meta":
        return real_to(t, *args, **kwargs)
    with making(None):
        found = real_to(t, *rest, **more) if rest or more else t
    return found if device is None else move(found, wanted(device), kwargs.get("non_blocking", False))


def pin(t: Tensor) -> Tensor:
    pinned = t.clone()
    pinned.pinned = True  # type: ignore[attr-defined]
    return pinned


class Event:
    def __init__(self, **_: Any):
        self.device, self.time = CUDA, 0.0

    def record(self, _stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.time - self.time)

    wait = synchronize = query = lambda *_: True


class Stream:
    device, cuda_stream = CUDA, 0
    wait_event = wait_stream = synchronize = lambda *_: None

    def __init__(self, *_: Any, **__: Any):
        pass

    def record_event(self, event: Event | None = None) -> Event:
        (event := event or Event()).record()
        return event


@contextmanager
def stream(one: Stream):
    state.streams.append(one)
    yield
    state.streams.pop()


@contextmanager
def graph(*_: Any, **__: Any):
    state.capturing = True
    try:
        yield
    finally:
        state.capturing = False


def install() -> None:
    """Pretend from here on, in this process."""
    import torch._dynamo
    import torch.profiler
    from triton.runtime.interpreter import GridExecutor

    state.streams.append(Stream())
    constants: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "set_device": None, "synchronize": None,
        "get_device_capability": (9, 0), "get_device_name": GPU.name, "get_device_properties": GPU, "empty_cache": None,
        "mem_get_info": (2**26, GPU.total_memory), "memory_allocated": 2**20, "max_memory_allocated": 2**20,
        "memory_reserved": 2**20, "reset_peak_memory_stats": None, "manual_seed_all": None, "manual_seed": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "default_stream": state.streams[0],
        "current_stream": lambda *_: state.streams[-1], "is_current_stream_capturing": lambda: state.capturing,
        "Event": Event, "Stream": Stream, "stream": stream, "graph": graph,
        "CUDAGraph": type("CUDAGraph", (), {"replay": lambda _: None}),
    }  # fmt: skip
    for name, value in constants.items():
        setattr(torch.cuda, name, value if callable(value) else lambda *_, value=value, **__: value)
    generator: Any = torch.Generator
    torch.Generator = type("Generator", (generator,), {"__new__": lambda *_, **__: generator.__new__(generator, "cpu")})
    run = GridExecutor.__call__

    def run_kernel(executor: Any, *args: Any, **options: Any) -> Any:
        tensors = [t for t in tree_leaves((args, options)) if isinstance(t, Tensor) and t.numel()]
        if not all(map(is_on_gpu, tensors)):
            raise ValueError(f"{executor.fn.__name__}: a pointer to memory of the CPU")
        trace, state.inside_kernel = sys.gettrace(), True
        sys.settrace(None)  # it would take most of the time
        try:
            with _disable_current_modes():
                return run(executor, *args, **options)
        finally:
            sys.settrace(trace)
            state.inside_kernel = False

    GridExecutor.__call__ = run_kernel  # type: ignore[method-assign]
    methods = {
        "device": property(lambda t: CUDA if is_on_gpu(t) else real_device(t)), "is_cuda": property(is_on_gpu),
        "cpu": lambda t: move(t, False), "cuda": lambda t: move(t, True), "to": to, "pin_memory": pin,
    }  # fmt: skip
    for name, value in methods.items():
        setattr(Tensor, name, value)
    for owner, names in ((torch, NEW + LIKE), (Tensor, METHODS)):
        for name in names:
            setattr(owner, name, factory(getattr(owner, name), name in LIKE + METHODS))
    Devices().__enter__()


if __name__ == "__main__":
    hide_packages()
    install()
    from benchmarks.gpu import gpu_tests, stand_ins

    stand_ins.provide()
    if sys.argv[1] == "collect":
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
        sys.exit(pytest.main(["--collect-only", *options, *gpu_tests.FOLDERS]))
    from tests.support.gpu_suite import run_all

    run_all(Path(sys.argv[2]), *sys.argv[3:])
