"""Device files: those of the package, and what is said about damaged ones."""

import json
from itertools import pairwise

import pytest

from moe_dualpipe.tools.planner.device import FOLDER, KINDS, device_names, load_device

CURVES = {kind: {"bf16": [[1e9, 0.2], [1e11, 0.6]]} for kind in KINDS}
GOOD = {
    "name": "mine", "aliases": [], "memory_gb": 80, "memory_bandwidth": 3e12, "sms": 132,
    "peak": {"bf16": 1e15, "fp8": None},
    "domain": {"gpus": 8, "bandwidth": 4e11, "share": 0.8, "latency": 1e-5},
    "network": {"bandwidth": 5e10, "share": 0.9, "latency": 2e-5},
    "efficiency": {**CURVES, "memory": 0.9},
    "launch": 4e-6,
}  # fmt: skip


def written(tmp_path, value):
    path = tmp_path / "mine.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def replaced(keys, value):
    """GOOD with another value at a key, such as "domain.share". Without the key if the value is ...."""
    copy = json.loads(json.dumps(GOOD))
    *above, last = keys.split(".")
    inside = copy
    for key in above:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return copy


@pytest.mark.parametrize("name", device_names())
def test_files_of_the_package(name):
    device = load_device(name)
    raw = json.loads((FOLDER / f"{name}.json").read_text())
    assert device.name == name
    assert all(load_device(alias.upper()) == device for alias in raw["aliases"])
    assert {"peak", "memory", "domain", "network", "launch"} <= {*device.sources}
    described = {source.partition(".")[0] for source in device.sources}
    assert described == {"peak", "memory", "domain", "network", "launch", "efficiency"}
    for precision, rate in device.peak.items():
        if rate is None:
            continue
        for kind in KINDS:
            shares = [device.efficiency(kind, precision, 10.0**power) for power in range(6, 15)]
            assert 0 < shares[0] < shares[-1] < 0.96
        # Larger products are faster in FLOP/s. Published curves may have a dip of some percent.
        assert all(after >= 0.95 * share for share, after in pairwise(shares))
        assert device.memory_bandwidth * device.memory_share < rate
    assert (
        sum(name in [one, *json.loads((FOLDER / f"{one}.json").read_text())["aliases"]] for one in device_names()) == 1
    )
    assert device.network.bandwidth <= device.domain.bandwidth
    assert device.network.gpus is None


def test_the_share_is_interpolated_in_the_logarithm(tmp_path):
    device = load_device(written(tmp_path, GOOD))
    share = [device.efficiency("product", "bf16", flops) for flops in (1.0, 1e9, 1e10, 10**10.5, 1e11, 1e20)]
    assert share == pytest.approx([0.2, 0.2, 0.4, 0.5, 0.6, 0.6])


def test_attention_in_fp8_runs_in_bf16():
    h100 = load_device("h100")
    assert h100.efficiency("attention_forward", "fp8", 1e12) == h100.efficiency("attention_forward", "bf16", 1e12)
    assert h100.efficiency("product", "fp8", 1e12) != h100.efficiency("product", "bf16", 1e12)
    assert (h100.flash2, load_device("a100").flash2, load_device("h200").flash2) == (0.54, 1.0, 0.54)
    assert (h100.cpu, load_device("gb200").cpu) == ("x86", "grace")


def test_curves_of_another_device_and_one_of_its_own(tmp_path):
    own = {"like": "h100", "memory": 0.5, "grouped": {"bf16": [[1e9, 0.125]]}}
    device, h100 = load_device(written(tmp_path, replaced("efficiency", own))), load_device("h100")
    assert device.efficiency("product", "bf16", 3e10) == h100.efficiency("product", "bf16", 3e10)
    assert device.efficiency("grouped", "bf16", 3e10) == 0.125
    assert device.memory_share == 0.5
    plain = load_device(written(tmp_path, replaced("efficiency", {"like": "h100"})))
    assert (plain.curves, plain.memory_share) == (h100.curves, h100.memory_share)


@pytest.mark.parametrize("name,near", [("h1000", "h100"), ("GB 20", "gb200"), ("", None)])
def test_unknown_names(name, near):
    with pytest.raises(ValueError, match=f"unknown device '{name}'") as error:
        load_device(name)
    assert (f"did you mean '{near}'" in str(error.value)) == (near is not None)
    assert "from: a10, a100," in str(error.value)
    assert "my_gpu.json" in str(error.value)


REFUSED = {
    "peak": (..., {}), "peak.bf16": ("fast", True), "memory_gb": (0,), "memory_bandwidth": (...,), "sms": (1.5,),
    "launch": (-1,), "name": (7,), "domain.gpus": (...,), "domain.share": (1.01,), "network.latency": (None,),
    "sources": (3,), "cpu": (3,), "efficiency": (...,), "efficiency.memory": (2, ...), "efficiency.flash2": (0,),
    "efficiency.grouped": (...,), "efficiency.grouped.bf16": (3, [[1, 2, 3]]),
    "efficiency.like": (["h100"], "./mine.json"),
    "efficiency.product.bf16": ([], [[1e9, 0.1], [1e9, 0.2]], [[0, 0.1]], [[1e9, 1.2]], [[1e9, 0]]),
}  # fmt: skip


@pytest.mark.parametrize("key,value", [(key, value) for key, values in REFUSED.items() for value in values], ids=str)
def test_a_damaged_file_is_one_line_that_names_the_file_and_the_key(tmp_path, key, value):
    path = written(tmp_path, replaced(key, value))
    with pytest.raises(ValueError) as error:
        load_device(path)
    text = str(error.value)
    assert text.startswith(f"{path} is not a device file: {key} ") and "\n" not in text and len(text) < 400
    for text in ("{", "[]"):
        with pytest.raises(ValueError, match=r"it is not JSON|peak must be an object"):
            load_device(written(tmp_path, text))
