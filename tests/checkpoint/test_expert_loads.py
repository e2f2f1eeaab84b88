"""The loads of experts that a run writes beside its checkpoints, and files of loads that are wrong."""

import pytest

from moe_dualpipe.checkpoint.expert_loads import read_loads
from tests.support.ranks import run_ranks
from tests.support.runs import settings, train


def test_the_loads_of_a_run_are_in_its_checkpoints(tmp_path, refused):
    config = settings(tmp_path / "run", seq_len=16, steps=3, save_every=2, keep=None)
    run_ranks(1, train, config)
    tokens = 4 * 16  # of a step
    for step, steps in ((2, 2), (3, 1)):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06}"
        layers, loads, maxima = read_loads(folder / "expert_loads.json")
        assert layers == [*range(config.model.num_dense_layers, config.model.num_layers)]
        assert [sum(load) for load in loads] == [steps * tokens * config.model.experts_per_token] * len(layers)
        largest = [max(load) * len(load) / sum(load) for load in loads]  # of the sum
        assert all(1.001 * mean >= one for mean, one in zip(maxima, largest, strict=True))
        assert steps > 1 or maxima == pytest.approx(largest)
    (folder / "expert_loads.json").unlink()
    words = ["plan", "estimate", "--model", "tiny", "--gpu", "l4", "--gpus", "2", "--loads"]
    assert f"{folder} is broken: " in refused(*words, folder)


@pytest.mark.parametrize("text,message", [
    ("[1]", "Expected `object`"), ('{"loads": [1]}', "Expected `array`"), ('{"loads": [["a"]]}', "Expected `float`"),
    ('{"loads": [[1]], "layers": [1, 2]}', '"layers" and '), ('{"loads": [[1]], "maxima": [1, 2]}', '"maxima" in '),
    ("{", "cannot read "),
])  # fmt: skip
def test_a_wrong_file_is_named(tmp_path, text, message):
    (tmp_path / "loads.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{message}.*loads.json|loads.json.*{message}"):
        read_loads(tmp_path / "loads.json")
