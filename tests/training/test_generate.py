"""A pipeline generates what the whole model, run plainly, generates; and every rank knows the text."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_run import MODEL

from moe_dualpipe.models import TransformerStage, build_model, inference, split
from moe_dualpipe.models.sampling import Sampling
from moe_dualpipe.runtime import P2P, Executor
from moe_dualpipe.schedule import build
from moe_dualpipe.training.generate import generate

PROMPTS = [torch.tensor(list(prompt)) for prompt in (b"hello pipeline", b"hello")]
HIDDEN = MODEL.hidden_size, torch.float32


def pipeline(rank, ranks, name, fused_loss=False):
    schedule = build(name, ranks, 2 * ranks)
    specs = split(MODEL, schedule.num_stages)
    stages = {
        s: TransformerStage(MODEL, specs[s], seed=5, fused_loss=fused_loss) for s in schedule.placement.stages[rank]
    }
    group = dist.group.WORLD if ranks > 1 else None
    return Executor(stages, P2P.connect(group, [], torch.device("cpu"))), schedule.placement, group


def generates_like_the_model(rank, ranks, name, fused_loss):
    parts, model = pipeline(rank, ranks, name, fused_loss), build_model(MODEL, seed=5)
    for sampling, window, prompts in (
        (Sampling(0), 40, PROMPTS),
        (Sampling(0.8), 40, PROMPTS[:1]),
        (Sampling(1.5, 9, 0.9), 8, PROMPTS[:1]),  # the window moves from the first token on
    ):
        got = generate(*parts, prompts, 7, HIDDEN, window, MODEL.vocab_size, sampling, seed=9)
        choices = sampling.temperature, sampling.top_k, sampling.top_p
        assert torch.equal(got, inference.generate(model, prompts, 7, window, *choices, seed=9))


@pytest.mark.parametrize("fused_loss,ranks,name", [
    (False, 1, "dualpipev"), (True, 2, "dualpipe"), (False, 2, "dualpipev"), (False, 2, "1f1b"),
])  # fmt: skip
def test_a_pipeline_generates_what_the_model_does(fused_loss, ranks, name):
    run_ranks(ranks, generates_like_the_model, ranks, name, fused_loss)


def test_a_pipeline_refuses_a_prompt_that_is_no_text():
    parts = pipeline(0, 1, "1f1b")
    with pytest.raises(ValueError, match="tokens are 0 to 255: got 256 in a prompt"):
        generate(*parts, [torch.tensor([256])], 1, HIDDEN, 8, MODEL.vocab_size, Sampling())
