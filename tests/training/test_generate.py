"""A pipeline generates what the whole model, run plainly, generates; and every rank knows the text."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_run import MODEL

from moe_dualpipe.models import TransformerStage, build_model, split
from moe_dualpipe.runtime import P2P, Executor
from moe_dualpipe.schedule import build
from moe_dualpipe.training.generate import generate

PROMPT, WINDOW = list(b"hello pipeline"), 8  # the window moves from the first token on


def generates_like_the_model(rank, ranks, name, temperature, fused_loss):
    schedule = build(name, ranks, 2 * ranks)
    specs = split(MODEL, schedule.num_stages)
    stages = {
        s: TransformerStage(MODEL, specs[s], seed=5, fused_loss=fused_loss) for s in schedule.placement.stages[rank]
    }
    group = dist.group.WORLD if ranks > 1 else None
    executor = Executor(stages, P2P.connect(group, [], torch.device("cpu")))
    hidden = (MODEL.hidden_size, torch.float32)
    got = generate(executor, schedule.placement, group, PROMPT, 6, hidden, WINDOW, temperature, seed=9)

    model, tokens, random = build_model(MODEL, seed=5), list(PROMPT), torch.Generator().manual_seed(9)
    with torch.no_grad():
        for _ in range(6):
            logits = model(torch.tensor([tokens[-WINDOW:]]))[0, -1]
            if temperature:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
            else:
                chosen = logits.argmax()
            tokens.append(int(chosen))
    assert got == tokens[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.0, 0.1])
@pytest.mark.parametrize("ranks,name", [(1, "dualpipev"), (2, "dualpipe"), (2, "dualpipev"), (2, "1f1b")])
def test_a_pipeline_generates_what_the_model_does(ranks, name, temperature):
    run_ranks(ranks, generates_like_the_model, ranks, name, temperature, False)


def test_a_stage_that_ends_without_logits_generates_the_same():
    run_ranks(2, generates_like_the_model, 2, "dualpipe", 0.1, True)
