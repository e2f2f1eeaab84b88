"""Tables of tile sizes: the shipped one, the user's, and lookups in both."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from moe_dualpipe.kernels.gpu import configs, families, gemm, swiglu
from moe_dualpipe.kernels.gpu.configs import KERNEL_NAMES, SHIPPED, TileConfig, TunedKernel
from moe_dualpipe.kernels.gpu.launch_args import arch_of
from moe_dualpipe.kernels.gpu.tiles import Tiling
from tests.support.kernels import DEVICE, offsets_of

A, B, C = TileConfig(16, 32, 16, 4, 1), TileConfig(32, 32, 16, 4, 1), TileConfig(64, 32, 16, 4, 1)


@pytest.fixture
def user_table(tmp_path, monkeypatch):
    """Path of the user's table, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configs.clear_caches()
    yield tmp_path / "moe-dualpipe" / "tuned.json"
    monkeypatch.undo()
    configs.clear_caches()


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("user_table")
@pytest.mark.parametrize("arch,family", [
    ("sm_86", "sm_80"), ("sm_87", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100"), ("sm_121", "sm_120"),
    ("gfx90a", "gfx942"), ("gfx950", "gfx942"),
    *((name, name) for name in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "interpreter")),
])  # fmt: skip
def test_a_known_gpu_uses_the_tiles_of_its_family(arch, family):
    entries = [e for e in configs.load_table(SHIPPED) if e.arch == family]
    fp8 = {("fp8", 1), ("any", 1)} if family not in ("sm_80", "gfx942") else set()
    others = {(name, size) for name in KERNEL_NAMES if name != "fp8" for size in (2, 4)}
    assert {(e.kernel, e.dtype_bytes) for e in entries} == others | fp8
    for e in entries:
        assert configs.lookup(e.kernel, arch, e.dtype_bytes, e.n, e.k, e.rows) == e.config


def test_the_shipped_tiles_fit_in_the_shared_memory_of_every_gpu_of_the_family():
    for entry in configs.load_table(SHIPPED):
        if entry.arch != "interpreter":
            c = entry.config
            buffers = c.stages * (c.block_m + c.block_n) * c.block_k * entry.dtype_bytes
            assert buffers + 1024 <= families.SHARED_LIMIT[entry.arch], entry  # 1024: barriers and the epilogue


@pytest.mark.usefixtures("user_table")
@pytest.mark.parametrize("arch,shared,family", [
    ("sm_75", 65_536, "sm_80"), ("sm_110", 232_448, "sm_100"), ("sm_110", 101_376, "sm_120"),
    ("sm_110", 65_536, "sm_120"),
    ("sm_130", 101_376, "sm_120"), ("sm_130", 65_536, "sm_120"), ("gfx1100", 65_536, "gfx942"),
])  # fmt: skip
def test_an_unknown_gpu_uses_the_nearest_family_that_fits_and_warns_once(arch, shared, family, monkeypatch):
    monkeypatch.setattr(families, "shared_memory_limit", lambda: shared)
    families.family_of.cache_clear()
    message = rf"no tile sizes are known for {arch}, so kernels use those of {family}: .* benchmarks\.tune"
    with pytest.warns(UserWarning, match=message) as warned:
        for kernel in {*KERNEL_NAMES} - {"fp8"}:
            assert configs.lookup(kernel, arch, 2, 512, 2048) == configs.lookup(kernel, family, 2, 512, 2048)
    assert len(warned) == 1
    families.family_of.cache_clear()


@pytest.mark.filterwarnings("error")
def test_the_users_table_has_priority_and_the_nearest_sizes_are_used(user_table):
    config = dataclasses.replace(A, tma=True, group_m=3, maxnreg=96, per_sm=2)
    entries = (
        TunedKernel("up", "sm_90", 2, 512, 2048, A), TunedKernel("up", "sm_90", 2, 4096, 2048, B),
        TunedKernel("down", "sm_90", 4, 1, 1, C), TunedKernel("wgrad", "sm_130", 2, 3, 5, config, 7),
    )  # fmt: skip
    shipped = configs.lookup("down", "sm_90", 2, 512, 2048)
    configs.clear_caches()
    configs.save_table(user_table, entries, gpu="a test", date="today")
    assert configs.load_table(user_table) == entries and '"gpu": "a test"' in user_table.read_text()
    assert configs.lookup("wgrad", "sm_130", 2, 64, 64) == config  # a tuned GPU needs no family
    assert [configs.lookup("up", "sm_90", 2, n, 2048) for n in (512, 768, 2048)] == [A, A, B]
    assert configs.lookup("down", "sm_90", 2, 512, 2048) == shipped  # the user's entry has another element size


@pytest.mark.parametrize("rows,height", [(4, 16), (32, 32)])
def test_products_choose_tiles_by_their_mean_rows_per_expert(rows, height, user_table):
    names = [name for name in KERNEL_NAMES if name != "any"]
    arch = arch_of(torch.device(DEVICE))
    few, many = ([TunedKernel(name, arch, 4, 16, 16, c, r) for name in names] for c, r in ((A, 4), (B, 32)))
    configs.save_table(user_table, [*few, *many])
    shapes = (3, 16, 16), (3, 32, 16), (3 * rows, 16), (3 * rows, 32)
    w, both, x, z = (torch.randn(shape, device=DEVICE) for shape in shapes)
    index, offsets = torch.zeros(3 * rows, dtype=torch.int32, device=DEVICE), offsets_of([0, 3 * rows, 0])
    for launch in (
        lambda tiling: gemm.rows_times_weights("down", x, w, tiling),
        lambda tiling: swiglu.swiglu_up(x, index, both, tiling, None, index),
        lambda tiling: swiglu.swiglu_down_backward(x, index, w, z, tiling, None, index),
    ):
        tiling = Tiling(offsets, 3 * rows)
        launch(tiling)
        assert [*tiling.tables] == [height]


@pytest.mark.usefixtures("user_table")
def test_tiles_are_lower_if_experts_have_few_rows_and_rows_that_are_not_16_byte_multiples_use_the_any_entries():
    for arch in ("sm_80", "sm_90", "sm_103", "sm_120", "gfx942"):
        for kernel in ("up", "down", "down_backward", "up_backward"):
            heights = [configs.lookup(kernel, arch, 2, 512, 2048, rows).block_m for rows in (0, 1, 64, 65, 5000)]
            assert heights == [64, 64, 64, 128, 128]
    for kernel, size, n, k, is_odd in (
        ("up", 2, 513, 2048, True), ("wgrad", 2, 512, 2044, True), ("wgrad", 4, 512, 2044, False),
        ("up", 2, 520, 2048, False),
    ):  # fmt: skip
        assert (configs.lookup(kernel, "sm_90", size, n, k) == configs.lookup("any", "sm_90", size, n, k)) == is_odd


@pytest.mark.parametrize("text,problem", [
    ("not a table", "is not a table of tuned kernels"),
    ('{"entries": [{"kernel": "up"}]}', "is not a table of tuned kernels .*delete it, or tune again"),
    ('{"entries": [{"kernel": "sideways", "arch": "sm_90", "dtype_bytes": 2, "n": 1, "k": 1, "config": '
     '{"block_m": 1, "block_n": 1, "block_k": 1, "warps": 1, "stages": 1}}]}',
     "unknown kernel 'sideways'; the kernels are up"),
])  # fmt: skip
def test_an_invalid_table_raises(user_table, text, problem):
    user_table.parent.mkdir()
    user_table.write_text(text)
    with pytest.raises(ValueError, match=f"{user_table}.*{problem}"):
        configs.lookup("up", "sm_90", 2, 512, 2048)
