"""Training runs: metrics, parameters that are counted once, replicas that differ, and a profile."""

import dataclasses
import json

import pytest
import torch
from torch.distributed import DistError

from moe_dualpipe.expert_parallel import ChosenBackend, Local
from moe_dualpipe.expert_parallel.labels import is_for_experts
from moe_dualpipe.kernels.products import in_onednn
from moe_dualpipe.models import build_model
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.host import as_device
from moe_dualpipe.training.loop import train_loop
from tests.support.kernels import ONEDNN
from tests.support.ranks import run_ranks
from tests.support.runs import (
    MODEL,
    SHALLOW,
    introduction,
    losses,
    make_trainer,
    records,
    settings,
    train,
    train_each,
)

MTP = dataclasses.replace(SHALLOW, mtp_layers=1)


def test_training_reduces_the_loss_and_records_metrics(tmp_path):
    config = settings(tmp_path / "run", steps=20, peak_tflops=0.001, eval_every=8)
    run = run_ranks(1, train, config)[0]
    validations = losses(run, "validation_loss")
    assert [*validations] == [0, 8, 16, 20] and validations[20] < validations[0] - 1
    record = run[11]
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_s", "expert_load_max_over_mean"} <= set(record)
    assert record["tokens"] == 4 * 32
    flops = train_flops_per_token(SHALLOW, 32) * record["tokens_per_s"]
    assert record["mfu"] == pytest.approx(flops / 1e9, abs=1e-4)
    assert 1 <= record["expert_load_max_over_mean"] <= MODEL.num_experts / MODEL.experts_per_token
    assert 0 <= record["dead_experts"] < 1


def drifting_runs(rank, configs):
    """Each run, of which a replica changes in step `when`. Returns the numbers of recorded steps."""
    recorded = []
    for config, when in configs:
        trainer = make_trainer(rank, config)
        train_step = trainer.step

        def drift(step, trainer=trainer, train_step=train_step, when=when):
            record = train_step(step)
            trainer.optimizer.wait()
            if step == when and rank:
                with torch.no_grad():
                    next(iter(trainer.optimizer.parameters.values())).view(-1)[0] += 1
            return record

        trainer.step = drift  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="must stay bit-equal"):
            train_loop(trainer)
        recorded.append(len(losses(records(config.checkpoint.out))) if rank == 0 else None)
    return recorded


DRIFTS = [
    ({"check_replicas_every": None}, 5, 6), ({"check_replicas_every": None, "save_every": 2}, 1, 2),
    ({"check_replicas_every": 3}, 3, 5), ({"check_replicas_every": 1, "zero": True}, 1, 2),
]  # fmt: skip


def test_replicas_that_differ_stop_the_run_at_the_next_check(tmp_path):
    base = {"pp": 1, "zero": False, "seq_len": 16}
    configs = [(settings(tmp_path / str(i), **base | one), when) for i, (one, when, _) in enumerate(DRIFTS)]
    assert run_ranks(2, drifting_runs, configs)[0] == [recorded for *_, recorded in DRIFTS]


def introductions(rank, configs):
    return [(introduction(rank, config), in_onednn(torch.ones(1))) for config in configs]


def test_parameters_are_counted_once_and_the_library_of_products_is_used_and_named(tmp_path):
    """Also if two ranks hold the embedding, as with MTP."""
    layouts = [
        {"model": MTP, "schedule": "1f1b"},
        {"pp": 1, "products": "onednn" if ONEDNN else "auto"},
        {"ep": 2, "products": "mkl"},
    ]
    configs = [settings(tmp_path / str(i), **changes) for i, changes in enumerate(layouts)]
    printed, nothing = run_ranks(2, introductions, configs)
    for (text, onednn), config in zip(printed, configs, strict=True):
        sizes = {name: p.numel() for name, p in build_model(config.model).named_parameters()}
        total = sum(sizes.values())
        idle = sum(size for name, size in sizes.items() if ".experts." in name) / 2  # two of four experts a token
        assert f"{total / 1e6:.2f} M parameters, {(total - idle) / 1e6:.2f} M active" in text
        assert (", experts over 2, on cpu in float32\n" in text) == (config.parallel.ep == 2)
        assert onednn == ("float32, products in oneDNN\n" in text)
        assert config.compute.products in ("auto", "onednn" if onednn else "mkl")
    assert [text for text, _ in nothing] == [""] * 3


SMALL = {"seq_len": 8, "eval_sequences": 2}
BALANCED = dataclasses.replace(SHALLOW, router_bias=True)
DENSE, EXPERT, BIAS = "layers.0.attention.qkv.weight", "layers.1.mlp.experts.gate_up", "layers.1.mlp.router.bias_E"


def flip_lowest_bit(tensor):
    element = tensor.detach().view(-1)[-1:].view(torch.uint8)
    element[0] ^= 1  # little-endian


def replicated(trainer):
    """The tensors of this rank that have replicas, by global name."""
    sets = (*trainer.replicas, *trainer.buffers.sets())
    return {name: tensor for one in sets if one.group for name, tensor in one.parameters.items()}


def reports(rank, config, names):
    """Flip a bit of each tensor on each rank in turn. Returns the error of the next step, by name and rank."""
    trainer = make_trainer(rank, config)
    trainer.step(0)
    seen = {}
    for name in names:
        for flipped in range(torch.distributed.get_world_size()):
            before = [tensor.clone() for tensor in trainer.state().values()]
            if rank == flipped:
                flip_lowest_bit(replicated(trainer)[name])
            with pytest.raises(RuntimeError) as error:
                trainer.step(1)
            if rank == flipped:
                flip_lowest_bit(replicated(trainer)[name])
            seen[name, flipped] = str(error.value)
            trainer.optimizer.drop_gradients()
            assert all(torch.equal(a, b) for a, b in zip(before, trainer.state().values(), strict=True))
    trainer.step(1)
    return seen


@pytest.mark.parametrize("changes", [
    {"pp": 1}, {"pp": 1, "dtype": "bfloat16"}, {"pp": 2}, {"pp": 2, "zero": False},
], ids=str)  # fmt: skip
@pytest.mark.quick("{'pp': 2}")
def test_a_flip_on_owner_or_other_rank_of_dense_expert_and_bias_stops_the_next_step_before_its_update(
    tmp_path, changes
):
    """pp 1: data-parallel replicas; pp 2: those of DualPipe on mirrored ranks."""
    names = [DENSE, EXPERT, BIAS]
    both = run_ranks(2, reports, settings(tmp_path, **SMALL, model=BALANCED, **changes), names)
    assert both[0] == both[1]
    assert both[0] == {
        (name, rank): f"ranks 0, 1 disagree in {name}: replicas must stay bit-equal"
        for name in names
        for rank in (0, 1)
    }


# ---- A run with --profile: same losses, a recording of every rank, and a report ----


@pytest.mark.long
def test_a_profile_reports_every_rank_and_does_not_change_the_run(tmp_path):
    model = dataclasses.replace(MODEL, num_layers=2)
    layout = {"pp": 1, "ep": 2, "batch_size": 8, "ep_backend": "all_to_all"}
    small = {"steps": 4, "seq_len": 16, "eval_sequences": 1, "model": model, **layout}
    plain, profiled = (
        settings(tmp_path / name, profile=steps, **small) for name, steps in (("plain", 0), ("profiled", 2))
    )
    runs = run_ranks(2, train_each, [plain, profiled])[0]
    assert losses(runs[1]) == losses(runs[0])
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "profiled" / "profile"
    recordings = {f"rank{rank}.json.gz" for rank in (0, 1)}
    assert {path.name for path in folder.iterdir()} == {*recordings, "report.json"}
    report = json.loads((folder / "report.json").read_text())
    assert len(report["pipelines"]) == 2
    for pipeline in report["pipelines"]:
        assert pipeline["step"] in (3, 4)
        (account,) = pipeline["ranks_ms"]
        assert account["forward"] > 0 and account["backward"] > 0 and account["optimizer"] > 0
        assert account["rest"] >= 0
        assert pipeline["makespan_ms"] <= pipeline["ranks_ms"][0]["step"]
    # 1 layer with experts, 4 micro-batches, 2 steps; 4 transfers (2 in forward, 2 in backward) and one of the counts.
    for rank in (0, 1):
        events = as_device(read_trace(folder / f"rank{rank}.json.gz"), NAMES).device_events
        names = [event.phase for event in events if event.kind == "comm"]
        assert {"attn(F)", "mlp(F)", "attn(B)", "optimizer"} <= {event.phase for event in events}
        assert sum(map(is_for_experts, names)) == 4 * 2 * (4 + 1)


class Late(Local):
    def check(self):
        raise DistError("late")


def test_a_step_reports_transfers_that_failed(tmp_path):
    with join_world("cpu"):
        trainer = make_trainer(0, settings(tmp_path, seq_len=8, steps=1))
        trainer.pipeline.expert_parallel = ChosenBackend(Late(1), "symmetric", "")
        with pytest.raises(DistError, match="late"):
            trainer.step(0)
