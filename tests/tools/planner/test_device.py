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
    assert device.network.bandwidth <= device.domain.bandwidth
    assert device.network.gpus is None


def test_names_and_aliases_are_unique():
    named = [*device_names()]
    for name in device_names():
        named += json.loads((FOLDER / f"{name}.json").read_text())["aliases"]
    assert len(named) == len({*named})
    asked = "a100 a800 h100 h800 h200 h20 gh200 b200 b300 gb200 gb300 mi300x mi325x mi355x l40s"
    assert {*asked.split()} <= {*named}


@pytest.mark.parametrize("name", ["h100", "H100", "H100 SXM", "h100_sxm", "dgx-h100"])
def test_spellings(name):
    assert load_device(name) == load_device("h100")


def test_numbers_of_data_sheets():
    h100, h800, gb200 = (load_device(name) for name in ("h100", "h800", "gb200"))
    assert h100.peak == {"bf16": 989.4e12, "fp8": 1978.9e12, "mxfp8": None}
    assert (h100.memory_gb, h100.memory_bandwidth, h100.sms, h100.domain.gpus) == (80, 3.35e12, 132, 8)
    assert h100.domain.bandwidth == 450e9
    assert h800.domain.bandwidth == 200e9
    assert h800.curves == h100.curves
    assert gb200.domain.gpus == 72


def test_the_share_is_interpolated_in_the_logarithm(tmp_path):
    device = load_device(written(tmp_path, GOOD))
    share = [device.efficiency("product", "bf16", flops) for flops in (1.0, 1e9, 1e10, 10**10.5, 1e11, 1e20)]
    assert share == pytest.approx([0.2, 0.2, 0.4, 0.5, 0.6, 0.6])


def test_attention_in_fp8_runs_in_bf16():
    h100 = load_device("h100")
    assert h100.efficiency("attention_forward", "fp8", 1e12) == h100.efficiency("attention_forward", "bf16", 1e12)
    assert h100.efficiency("product", "fp8", 1e12) != h100.efficiency("product", "bf16", 1e12)
    with pytest.raises(ValueError, match="a100 does not compute in fp8: choose bf16"):
        load_device("a100").efficiency("product", "fp8", 1e12)
    with pytest.raises(ValueError, match="does not compute in int4: choose bf16 or fp8"):
        h100.efficiency("grouped", "int4", 1e12)


def test_curves_of_another_device_and_one_of_its_own(tmp_path):
    own = {"like": "h100", "memory": 0.5, "grouped": {"bf16": [[1e9, 0.125]]}}
    device, h100 = load_device(written(tmp_path, replaced("efficiency", own))), load_device("h100")
    assert device.efficiency("product", "bf16", 3e10) == h100.efficiency("product", "bf16", 3e10)
    assert device.efficiency("grouped", "bf16", 3e10) == 0.125
    assert device.memory_share == 0.5
    plain = load_device(written(tmp_path, replaced("efficiency", {"like": "h100"})))
    assert (plain.curves, plain.memory_share) == (h100.curves, h100.memory_share)


@pytest.mark.parametrize("name,near", [("h1000", "h100"), ("GB 20", "gb200"), ("mi300", None), ("", None)])
def test_unknown_names(name, near):
    if name == "mi300":
        assert load_device(name).name == "mi300x"
        return
    with pytest.raises(ValueError, match=f"unknown device '{name}'") as error:
        load_device(name)
    assert (f"did you mean '{near}'" in str(error.value)) == (near is not None)
    assert "from: a10, a100," in str(error.value)
    assert "my_gpu.json" in str(error.value)


@pytest.mark.parametrize("keys,value,message", [
    ("peak", ..., "peak must be an object: got None"),
    ("peak", {}, "peak has no precision with a number"),
    ("peak.bf16", "fast", "peak.bf16 must be a positive number: got 'fast'"),
    ("peak.bf16", True, "peak.bf16 must be a positive number: got True"),
    ("memory_gb", 0, "memory_gb must be a positive number: got 0"),
    ("memory_bandwidth", ..., "memory_bandwidth must be a positive number: got None"),
    ("sms", 1.5, "sms must be a positive integer: got 1.5"),
    ("launch", -1, "launch must be a positive number: got -1"),
    ("name", 7, "name must be a text: got 7"),
    ("domain", [], "domain.gpus must be a positive integer: got None"),
    ("domain.gpus", ..., "domain.gpus must be a positive integer: got None"),
    ("domain.share", 1.01, "domain.share must be a number above 0 and at most 1: got 1.01"),
    ("network.latency", None, "network.latency must be a positive number: got None"),
    ("sources", 3, "sources must be an object: got 3"),
    ("efficiency", ..., "efficiency must be an object: got None"),
    ("efficiency.memory", 2, "efficiency.memory must be a number above 0 and at most 1: got 2"),
    ("efficiency.memory", ..., "efficiency.memory must be a number above 0 and at most 1: got None"),
    ("efficiency.grouped", ..., "efficiency.grouped must be an object: got None"),
    ("efficiency.grouped.bf16", 3, "efficiency.grouped.bf16 must be a list of [FLOPs, share], with"),
    ("efficiency.grouped.bf16", [[1, 2, 3]], "efficiency.grouped.bf16 must be a list of [FLOPs, share]"),
    ("efficiency.product.bf16", [], "efficiency.product.bf16 must be a list of"),
    ("efficiency.product.bf16", [[1e9, 0.1], [1e9, 0.2]], "efficiency.product.bf16 must be a list of"),
    ("efficiency.product.bf16", [[0, 0.1]], "efficiency.product.bf16 must be a list of"),
    ("efficiency.product.bf16", [[1e9, 1.2]], "efficiency.product.bf16 must be a list of"),
    ("efficiency.product.bf16", [[1e9, 0]], "efficiency.product.bf16 must be a list of"),
    ("efficiency", {"like": "./mine.json"}, "efficiency.like must be a device of this package: got './mine.json'"),
    ("efficiency", {"like": ["h100"]}, "efficiency.like must be a device of this package"),
])  # fmt: skip
def test_a_damaged_file_is_one_line_that_names_the_key(tmp_path, keys, value, message):
    path = written(tmp_path, replaced(keys, value))
    with pytest.raises(ValueError) as error:
        load_device(path)
    assert str(error.value).startswith(f"{path} is not a device file: {message}")
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    for path, message in [
        (written(tmp_path, "{"), "it is not JSON: Expecting"), (tmp_path / "none.json", "No such file"),
        (tmp_path, "it is not a file"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"^cannot read {path}: {message}"):
            load_device(path)
    path = written(tmp_path, "[]")
    with pytest.raises(ValueError, match="peak must be an object"):
        load_device(path)
