"""Runs that train adapters: from weights, resumed, exported, and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_dualpipe.checkpoint.huggingface import from_pretrained
from moe_dualpipe.models.config import LoRA
from tests.support.checkpoints import tensors_of
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, equal_tensors, make_run, records, train, train_and_listen
from tests.support.runs import settings as small_settings

LORA = LoRA(2)
MODEL = replace(SHALLOW, shared_gate=True)  # as Qwen2-MoE


def settings(out, **changes):
    return small_settings(out, **{"model": MODEL, **changes})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A published model, and the run that trained it."""
    folder = tmp_path_factory.mktemp("base")
    run_ranks(1, train, settings(folder / "run", export=str(folder / "hf")))
    return folder


@pytest.mark.parametrize("weights", ["run", "hf"])
@pytest.mark.quick("run")
def test_the_base_stays_and_a_resumed_run_is_bit_equal(base, weights, tmp_path):
    changes = {"weights": str(base / weights), "lora": LORA, "steps": 4, "save_every": 2, "ep": 2}
    (printed, _) = run_ranks(2, train_and_listen, settings(tmp_path / "whole", **changes))
    assert "adapters of rank 2 and scale 2 in attention, experts, dense, shared: 16 bytes for each trained" in printed
    assert "adapters, relative to the weights that they adapt: attention " in printed
    (halted,) = Path(tmp_path / "whole/checkpoints").glob("step-000002")
    other = settings(tmp_path / "other", lora=LoRA(2, targets=("experts",)), steps=4, resume=str(halted))
    with pytest.raises(
        ValueError, match=r"step-000002 has adapters of .* in attention, experts, dense, shared, but the options say"
    ):
        make_run(other)
    resumed = settings(tmp_path / "again", lora=LORA, steps=4, resume=str(halted), ep=2)
    run_ranks(2, train, resumed)
    whole = tensors_of(tmp_path / "whole")
    assert equal_tensors(whole, tensors_of(tmp_path / "again"))
    before = tensors_of(base / "run")
    frozen = {name for name in before if name.startswith("model.")}
    assert equal_tensors({name: before[name] for name in frozen}, {name: whole[name] for name in frozen})
    state = {name.partition(".")[2] for name in whole if name.startswith("exp_avg.")}
    assert state and all(".lora." in name for name in state)
    first, last = (records(tmp_path / "whole")[i]["validation_loss"] for i in (0, -1))
    assert first == pytest.approx(records(base / "run")[-1]["validation_loss"], rel=1e-6)
    assert last < first


def test_a_run_exports_its_adapter_and_another_goes_on_from_it(base, tmp_path):
    out = str(tmp_path / "adapter")
    lora = LoRA(2, targets=("experts",), export="adapter")
    changes = {"weights": str(base / "hf"), "steps": 4}
    run_ranks(1, train, settings(tmp_path / "first", lora=lora, export=out, **changes))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base / "hf") and config["target_modules"] == []
    for other in ({"rank": 3}, {"alpha": 1.0}, {"targets": ("attention",)}):
        with pytest.raises(
            ValueError,
            match=r"adapter has adapters of rank 2 and scale 2 in experts, but the options say .*: leave out",
        ):
            make_run(settings(tmp_path / "second", lora=LoRA(adapter=out, **other), **changes))
    with pytest.raises(
        ValueError, match=f"no checkpoint in {out}: it is an adapter: use train.py --weights MODEL --set"
    ):
        make_run(settings(tmp_path / "second", **{**changes, "weights": out}))
    run = make_run(settings(tmp_path / "second", lora=LoRA(adapter=out), **changes))
    assert (run.config.lora.rank, run.config.lora.targets) == (2, ("experts",))
    run_ranks(1, train, settings(tmp_path / "second", lora=LoRA(adapter=out), **changes))
    losses = [[record["validation_loss"] for record in records(tmp_path / name) if "validation_loss" in record]
              for name in ("first", "second")]  # fmt: skip
    assert losses[1][0] == pytest.approx(losses[0][-1], rel=1e-6)


def test_a_new_run_starts_from_merged_weights(base, tmp_path):
    merged = str(tmp_path / "merged")
    changes = {"weights": str(base / "hf"), "steps": 4}
    run_ranks(1, train, settings(tmp_path / "first", lora=LORA, export=merged, **changes))
    expected = records(tmp_path / "first")[-1]["validation_loss"]
    for weights in (merged, str(tmp_path / "first")):
        run_ranks(1, train, settings(tmp_path / Path(weights).name / "next", weights=weights, steps=1))
        found = records(tmp_path / Path(weights).name / "next")[0]["validation_loss"]
        assert found == pytest.approx(expected, rel=1e-6)
    assert not any("lora" in name for name, _ in from_pretrained(merged).named_parameters())


@pytest.mark.parametrize(("changes", "message"), [
    ({"lora": LORA}, "--lora 2 adapts a trained model: name one with --weights"),
    ({"lora": LoRA(alpha=3.0)}, "lora.alpha needs --lora RANK, which trains adapters"),
    ({"lora": LoRA(export="adapter")}, "lora.export=adapter needs --lora RANK"),
    ({"lora": LoRA(2, targets=("expert",)), "weights": "hf"}, "unknown lora.targets 'expert'; did you mean 'experts'?"),
    ({"lora": LoRA(adapter="nowhere")}, "lora.adapter nowhere needs --weights, the model that it adapts"),
    ({"lora": LoRA(adapter="nowhere"), "weights": "hf"}, "cannot read nowhere/adapter_config.json"),
])  # fmt: skip
def test_options_that_train_no_adapter_are_refused(changes, message, base, tmp_path):
    if "weights" in changes:
        changes = {**changes, "weights": str(base / changes["weights"])}
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.").replace("?", r"\?")):
        make_run(settings(tmp_path / "run", **changes))
