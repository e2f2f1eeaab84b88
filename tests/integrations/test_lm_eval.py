"""The model in lm-evaluation-harness: log-likelihoods are those of the logits.

The harness has many dependencies. Without it, these tests use a stand-in.
"""

import importlib
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from moe_dualpipe.checkpoint import open_model
from moe_dualpipe.inference import generate
from tests.support.ranks import run_ranks
from tests.support.runs import settings, train

MODULE = "moe_dualpipe.integrations.lm_eval"
installed = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
LENGTH = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_eval") / "run"
    run_ranks(1, train, settings(folder, steps=3, seq_len=LENGTH, eval_sequences=1))
    return str(folder)


class LM:
    cache_hook = SimpleNamespace(add_partial=lambda *_: None)


STAND_IN = {
    "lm_eval": {}, "lm_eval.models": {}, "lm_eval.api": {}, "lm_eval.api.model": {"LM": LM},
    "lm_eval.api.registry": {"register_model": lambda _name: lambda cls: cls},
}  # fmt: skip
"""The names that models of the harness are built from."""


@pytest.fixture(params=["stand-in", pytest.param("lm_eval", marks=installed)])
def harness(request, monkeypatch):
    """The module under test, with the harness or its stand-in."""
    if request.param == "lm_eval":
        yield importlib.import_module(MODULE)
        return
    for name, names in STAND_IN.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


def log_probs(model, ids):
    """log p of each token but the first, and whether it is the most likely one."""
    with torch.no_grad():
        all_SV = model.eval()(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    labels_S = torch.tensor(ids[1:])
    return all_SV.gather(1, labels_S[:, None])[:, 0], all_SV.argmax(-1) == labels_S


def test_log_likelihoods_are_those_of_the_logits(harness, run):
    model, _ = open_model(run)
    pairs = [("def f", "(x)"), ("", "class"), ("a  ", "b"), ("   ", "b"), ("x" * 60, " = 1"), ("de", "f "), ("x", "")]
    contexts = [first + "at" for first in "abcdefghijklmnop"]
    nexts = [generate(model, torch.tensor([[*c.encode()]]), 1, LENGTH, temperature=0).item() for c in contexts]
    pairs.insert(0, next((c, chr(token)) for c, token in zip(contexts, nexts, strict=True) if 0 < token < 128))
    lm = harness.MoEDualPipe(run, LENGTH, batch_size=2, device="cpu")
    found = lm.loglikelihood(requests(*pairs))
    assert found[0][1] is True and found[-1] == (0.0, True)  # of nothing
    for (context, continuation), (value, is_greedy) in zip(pairs[:-1], found, strict=False):
        ids = [*(context.encode() or b"\0"), *continuation.encode()][-LENGTH - 1 :]
        spaces = len(context) - len(context.rstrip()) if context.strip() else 0
        number = len(continuation) + spaces
        expected, most_likely = log_probs(model, ids)
        assert value == pytest.approx(expected[len(expected) - number :].sum().item(), rel=1e-5, abs=1e-9)
        assert is_greedy == most_likely[len(expected) - number :].all().item()


def test_a_continuation_longer_than_the_context_is_scored_in_parts(harness, run):
    model, _ = open_model(run)
    text = "import os, sys\n" * 4
    found = harness.MoEDualPipe(run, LENGTH, device="cpu").loglikelihood(requests(("def", text), ("a", "b")))
    ids, expected = [*b"f", *text.encode()], 0.0
    for first in range(0, len(text), LENGTH):  # each part after the token before it, and the last after what fits
        scored = len(ids[first + 1 : first + 1 + LENGTH])
        row = [*b"de", *ids][: first + 3 + scored][-LENGTH - 1 :]
        expected += log_probs(model, row)[0][-scored:].sum().item()
    assert found[0][0] == pytest.approx(expected, rel=1e-5) and found[0][1] is False
    assert found[1][0] == pytest.approx(log_probs(model, [*b"ab"])[0].sum().item(), rel=1e-5)


HARNESS = {
    "__init__.py": "",
    "api/__init__.py": "",
    "api/model.py": "class LM: pass",
    "api/registry.py": """
models = {}

def register_model(name):
    return lambda cls: models.setdefault(name, cls)

def get_model(name):
    if not models:
        import lm_eval.models
    return models[name]
""",
    "models/__init__.py": "from lm_eval.api.registry import register_model\nregister_model('hf')(object)",
}
"""The harness, as far as it registers models: its own ones with the first import, or with the first use of none."""


def test_the_models_of_the_harness_are_there_beside_ours(tmp_path, monkeypatch):
    for name, text in HARNESS.items():
        (tmp_path / "lm_eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lm_eval" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [*sys.modules]:
        if name == MODULE or name.partition(".")[0] == "lm_eval":
            monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module(MODULE)
    get_model = importlib.import_module("lm_eval.api.registry").get_model
    assert get_model("hf") is object and get_model("moe-dualpipe") is module.MoEDualPipe
    for name in [*sys.modules]:
        if name == MODULE or name.partition(".")[0] == "lm_eval":
            monkeypatch.delitem(sys.modules, name)


def test_the_log_likelihood_of_a_text_counts_every_token(harness, run):
    model, _ = open_model(run)
    texts = ["import os\n", "x = [1, 2, 3]\n" * 5, "a", ""]
    found = harness.MoEDualPipe(run, LENGTH, device="cpu").loglikelihood_rolling(requests(*((text,) for text in texts)))
    for text, value in zip(texts, found, strict=True):
        ids, expected, done = [0, *text.encode()], 0.0, 0
        while done < len(ids) - 1:
            start = max(0, min(done, len(ids) - 1 - LENGTH))
            values, _ = log_probs(model, ids[start : start + LENGTH + 1])
            expected += values[done - start :].sum().item()
            done = start + len(values)
        assert value == pytest.approx(expected, rel=1e-5)


def test_text_is_generated_up_to_a_stop_string(harness, run):
    model, tokenizer = open_model(run)
    lm = harness.MoEDualPipe(run, LENGTH, device="cpu")
    prompt = torch.tensor([[*b"import "]])
    whole = tokenizer.decode(generate(model, prompt, 12, LENGTH, temperature=0, stop=0)[0].tolist()).split("\0")[0]
    stop = whole[4]
    asked = [
        ("import ", {"max_gen_toks": 12}),
        ("import ", {"max_gen_toks": 12, "until": [stop, "never here"], "do_sample": False, "temperature": 0.7}),
        ("import ", {"max_gen_toks": 12, "until": stop}),
        ("x" * 99, {"max_gen_toks": 2, "do_sample": True, "temperature": 2.0, "top_k": 5}),
    ]
    found = lm.generate_until(requests(*asked))
    assert found[0] == whole
    assert found[1] == found[2] == whole[: whole.index(stop)]
    assert len(found[3]) <= 2


def test_what_cannot_be_evaluated(harness, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        harness.MoEDualPipe(str(tmp_path))


def test_without_the_harness_the_command_says_how_to_install_it(run, monkeypatch, refused):
    for name in STAND_IN:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    message = "evaluation on tasks needs lm-evaluation-harness: pip install lm-eval\n"
    assert refused("eval", run, "--tasks", "arc_easy") == message
