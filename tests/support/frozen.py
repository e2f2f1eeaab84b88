"""Stages whose layers freeze parameters themselves (`requires_grad=False` in the constructor)."""

from moe_dualpipe.models import TransformerStage
from moe_dualpipe.pipeline import pipeline as pipeline_module
from tests.support.pipelines import freeze


class Freezer:
    """Freezes the parameters of the stages that match a pattern, before a Trainer builds its optimizer."""

    def __init__(self, patch, pattern):
        class FrozenStage(TransformerStage):
            def __init__(self, *args):
                super().__init__(*args)
                freeze(self, pattern)

        patch.setattr(pipeline_module, "TransformerStage", FrozenStage)
