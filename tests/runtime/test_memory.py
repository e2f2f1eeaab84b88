"""Free main memory, from files as Linux writes them, and freed memory that a process keeps."""

import ctypes
import resource

import pytest
import torch

from moe_dualpipe.runtime.memory import free_main_memory, keep_freed_memory

MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\nSwapFree: 100 kB\nHugePages_Total: 0\n"
KB = 1024


def free(tmp_path, cgroup, files, meminfo=MEMINFO):
    of_proc = {"proc/self/cgroup": cgroup, "proc/meminfo": meminfo}
    for name, content in (of_proc | {f"sys/{name}": text for name, text in files.items()}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return free_main_memory(tmp_path / "proc", tmp_path / "sys")


def group(path, limit, usage, stat, names=("memory.max", "memory.current")):
    return {f"{path}/{names[0]}": limit, f"{path}/{names[1]}": usage, f"{path}/memory.stat": stat}


VERSION_2 = group("a", 300 * KB, 250 * KB, f"anon {50 * KB}\nfile {190 * KB}\nslab_reclaimable {10 * KB}\n")
VERSION_1 = "5:devices:/docker/x\n4:cpu,memory:/docker/x\n0::/\n"
LIMIT_1 = 200 * KB, 80 * KB, f"cache 1\ntotal_cache {30 * KB}\n", ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize("cgroup,files,expected", [
    ("0::/\n", {}, 700), ("0::/a\n", group("a", "max", 5, "anon 5\n"), 700),
    # The limits of all groups above count.
    ("0::/a/b\n", VERSION_2 | group("a/b", 500 * KB, 20 * KB, "file 0\n"), 300 - 50 + 100),
    ("0::/a/b\n", VERSION_2 | group("a/b", 10 * KB, 500 * KB, "file 0\n"), 0),
    # In a container and outside.
    *((VERSION_1, group(where, *LIMIT_1), 200 - 80 + 30 + 100) for where in ("memory", "memory/docker/x")),
])  # fmt: skip
def test_free_memory_is_what_the_machine_has_and_the_limits_of_the_process_allow(tmp_path, cgroup, files, expected):
    assert free(tmp_path, cgroup, files) == expected * KB


def test_unknown_memory(tmp_path):
    assert free(tmp_path, "0::/\n", {}, meminfo="MemTotal: 1000 kB\n") is None
    assert free_main_memory(tmp_path / "nowhere") is None


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_pages_of_freed_memory_are_used_again():
    keep_freed_memory()
    faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.zeros(2**20) for _ in range(40)]  # 160 MiB
        del blocks
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[-1] < 0.5 * 40 * 2**22 / resource.getpagesize()  # the rest is in pieces between other blocks
