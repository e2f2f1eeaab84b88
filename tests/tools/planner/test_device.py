"""Devices and their links: files of the package, names that CUDA gives, damaged files, and transfers."""

import json
import random
from itertools import pairwise

import pytest
import torch

from moe_dualpipe.runtime.known_gpus import FOLDER, device_names, peak_flops
from moe_dualpipe.tools.planner.device import KINDS, gather, load_device, seconds
from moe_dualpipe.tools.planner.routing import rows_sent

CURVES = {kind: {"bf16": [[1e9, 0.2], [1e11, 0.6]]} for kind in KINDS}
GOOD = {
    "name": "mine", "memory_gb": 80, "memory_bandwidth": 3e12, "sms": 132, "peak": {"bf16": 1e15, "fp8": None},
    "domain": {"gpus": 8, "bandwidth": 4e11, "share": 0.8, "latency": 1e-5},
    "network": {"bandwidth": 5e10, "share": 0.9, "latency": 2e-5}, "efficiency": {**CURVES, "memory": 0.9},
    "launch": 4e-6,
}  # fmt: skip


def written(tmp_path, keys="name", value="mine"):
    """GOOD with another value at a key, such as "domain.share". Without the key if the value is ...."""
    copy = json.loads(json.dumps(GOOD))
    *above, last = keys.split(".")
    inside = copy
    for key in above:
        inside = inside[key]
    inside[last] = value
    if value is ...:
        del inside[last]
    (tmp_path / "mine.json").write_text(json.dumps(copy))
    return tmp_path / "mine.json"


@pytest.mark.parametrize("name", device_names())
def test_files_of_the_package(name):
    device = load_device(name)
    assert device.name == name and all(load_device(alias.upper()) == device for alias in device.aliases)
    described = {source.partition(".")[0] for source in device.sources}
    assert described == {"peak", "memory", "domain", "network", "launch", "efficiency"}
    for precision, rate in device.peak.items():
        for kind in KINDS[: 4 if precision == "bf16" else 2] if rate else ():
            shares = [device.share(kind, precision, 10.0**power) for power in range(6, 15)]
            assert 0 < shares[0] < shares[-1] < 0.96
            # Larger products are faster in FLOP/s. Published curves may have a dip of some percent.
            assert all(after >= 0.95 * share for share, after in pairwise(shares))
        assert rate is None or device.passes < rate
    known = [json.loads((FOLDER / f"{one}.json").read_text())["aliases"] + [one] for one in device_names()]
    assert sum(name in names for names in known) == 1
    assert device.network.bandwidth <= device.domain.bandwidth and device.network.gpus is None


def test_the_share_is_interpolated_in_the_logarithm(tmp_path):
    device = load_device(written(tmp_path))
    share = [device.share("product", "bf16", flops) for flops in (1.0, 1e9, 1e10, 10**10.5, 1e11, 1e20)]
    assert share == pytest.approx([0.2, 0.2, 0.4, 0.5, 0.6, 0.6])


def test_a_device_has_the_curves_of_the_one_that_it_is_like_but_for_its_own(tmp_path):
    own = {"like": "h200", "memory": 0.5, "grouped": {"bf16": [[1e9, 0.125]]}}  # an H200 is like an H100
    device, h100 = load_device(written(tmp_path, "efficiency", own)).efficiency, load_device("h100").efficiency
    assert (device.product, device.flash2) == (h100.product, 0.54) and load_device("a100").efficiency.flash2 == 1.0
    assert (device.grouped, device.memory) == ({"bf16": ((1e9, 0.125),)}, 0.5)


@pytest.mark.parametrize("name,tflops", [
    ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756), ("NVIDIA GB200", 2500), ("NVIDIA L4", 121),
    ("AMD Instinct MI300X", 1307.4), ("NVIDIA GeForce RTX 4090", 165.2),
    # slices, smaller devices of the same name, unknown devices
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L40", None),
    ("NVIDIA GeForce RTX 4090 D", None), ("", None), ("AMD EPYC 9654", None),
])  # fmt: skip
def test_peak_flops_of_the_devices_that_cuda_names(name, tflops):
    expected = None if tflops is None else pytest.approx(tflops * 1e12)
    assert peak_flops(name, torch.bfloat16) == peak_flops(name, torch.float16) == expected
    assert peak_flops(name, torch.float32) is None


REFUSED = {
    "peak": (..., {}), "peak.bf16": ("fast", True, ...), "peak.fp8": (1e15,), "memory_gb": (0,), "name": (7,),
    "memory_bandwidth": (...,), "sms": (1.5,), "launch": (-1,), "domain.gpus": (...,), "domain.share": (1.01,),
    "network.latency": (None,), "sources": (3,), "cpu": (3,), "efficiency": (...,), "efficiency.memory": (2, ...),
    "efficiency.flash2": (0,), "efficiency.grouped": (...,), "efficiency.grouped.bf16": (3, [[1, 2, 3]], ...),
    "efficiency.attention_backward.bf16": (...,), "efficiency.like": (["h100"], "./mine.json"),
    "efficiency.product.bf16": ([], [[1e9, 0.1], [1e9, 0.2]], [[0, 0.1]], [[1e9, 1.2]], [[1e9, 0]]),
}  # fmt: skip


@pytest.mark.parametrize("key,value", [(key, value) for key, values in REFUSED.items() for value in values], ids=str)
def test_a_damaged_file_is_one_line_that_names_the_file_and_the_key(tmp_path, key, value):
    path = written(tmp_path, key, value)
    with pytest.raises(ValueError) as error:
        load_device(path)
    text = str(error.value)
    assert text.startswith(f"{path} is not a device file: ") and "\n" not in text and len(text) < 400
    assert key.removesuffix(".bf16").split(".")[-1] in text


# ---- Transfers: bytes against counts of simulated tokens, and the slower of two links ----


H100 = load_device("h100")


def simulated(experts, top_k, ep, domain, backend, groups=1, top_groups=1, tokens=4000):
    """Rows of a token that leave its rank 0, counted on random choices: within the fast domain, and beyond it."""
    rng, each, in_group, near, far = random.Random(0), experts // ep, experts // groups, 0, 0
    for _ in range(tokens):
        chosen = rng.sample(range(groups), top_groups)
        choices = [group * in_group + index for group in chosen for index in range(in_group)]
        ranks = [expert // each for expert in rng.sample(choices, top_k)]
        if backend == "all_to_all":
            near += sum(0 < rank < domain for rank in ranks)
            far += sum(rank >= domain for rank in ranks)
        else:
            near += len({rank for rank in ranks if rank != 0})  # also those that another domain forwards
            far += len({rank // domain for rank in ranks} - {0})
    return near / tokens, far / tokens


# One group, then: a group is a domain, several domains, half a domain, a rank, and a part of a rank.
CASES = [
    (64, 8, 16, 8, 1, 1), (8, 2, 8, 4, 1, 1), (16, 2, 4, 2, 1, 1), (256, 8, 64, 8, 8, 4), (64, 6, 32, 4, 4, 2),
    (64, 6, 32, 16, 4, 2), (64, 4, 16, 4, 16, 3), (64, 4, 8, 4, 32, 6), (64, 8, 8, 8, 1, 1), (64, 8, 1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["all_to_all", "deepep"])
@pytest.mark.parametrize("experts,top_k,ep,domain,groups,top_groups", CASES)
@pytest.mark.quick(
    "64-8-16-8-1-1-deepep", "8-2-8-4-1-1-all_to_all", "16-2-4-2-1-1-deepep", "256-8-64-8-8-4-all_to_all",
    "64-6-32-4-4-2-deepep", "64-6-32-16-4-2-all_to_all", "64-4-16-4-16-3-deepep", "64-4-8-4-32-6-all_to_all",
    "64-8-8-8-1-1-deepep", "64-8-1-1-1-1-all_to_all",
)  # fmt: skip
def test_rows_equal_those_of_random_choices(experts, top_k, ep, domain, groups, top_groups, backend):
    rows = rows_sent(experts, top_k, ep, domain, backend, groups, top_groups)
    expected = simulated(experts, top_k, ep, domain, backend, groups, top_groups)
    assert (rows.near, rows.far) == pytest.approx(expected, rel=0.05, abs=0.03)
    if groups > 1:
        free = rows_sent(experts, top_k, ep, domain, backend)
        assert (rows.far < free.far) == (rows.near < free.near) == (backend == "deepep")


def test_groups_across_domains_do_not_count():
    assert rows_sent(96, 8, 16, 4, "deepep", 3, 1) == rows_sent(96, 8, 16, 4, "deepep")


def test_a_group_has_a_ring_through_each_card_of_a_domain():
    inside, beyond, far = (gather(H100, 1e9, 8, distance) for distance in (1, 2, 8))
    assert inside == seconds(H100.domain, 1e9 * 7 / 8)
    assert beyond == seconds(H100.network, 1e9 * 7 / 8 / 4) > seconds(H100.domain, 1e9 * 7 / 8)  # 4 in each domain
    assert far == seconds(H100.network, 1e9 * 7 / 8) == gather(H100, 1e9, 8, 16)  # one in each
    sent = 1e9 * 63 / 64
    assert gather(H100, 1e9, 64, 1) == max(seconds(H100.domain, sent), seconds(H100.network, sent / 8))
    assert gather(H100, 1e9, 1, 1) == gather(H100, 0, 8, 1) == 0
