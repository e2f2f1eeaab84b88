"""Refuse keys of config.json that nothing reads, if they could change what the model computes.

Other programs write many keys, and new versions of an architecture add more. A key such as `embedding_multiplier`,
whose name contains a word for a part of the model, is refused unless its value means "off".
"""

from collections.abc import Mapping
from typing import Any

from ...messages import printable, quoted

_PARTS = """
act activation alibi attention attn bias cap capping clip compression conv dense dim dropout embedding expert experts
factor gate group groups head heads hidden index interleave jitter kv layer layers lora mask mlp moe mscale mtp
multiplier mup nextn noise norm position qk qkv quantization rank residual rope rotary routed router scale scaling score
scoring shared sink sinks size sliding softcap softcapping sparse swiglu theta topk v window yarn
"""
_OF_OTHERS = """
output_attentions output_hidden_states output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux ep_size
chunk_size_feed_forward cross_attention_hidden_size add_cross_attention pruned_heads num_beam_groups
attn_implementation experts_implementation max_position_embeddings max_window_layers no_repeat_ngram_size
encoder_no_repeat_ngram_size quantization_config
"""
_WORDS = frozenset(_PARTS.split())
"""Words for what a model computes."""
_HARMLESS = frozenset(_OF_OTHERS.split())
"""Keys with such a word that do not change what the model computes, or that are read elsewhere."""
_FACTORS = {"factor", "multiplier", "scale", "scaling"}


class ReadKeys(dict[str, Any]):
    """The contents of config.json. Remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def refuse_others(self) -> None:
        """Raise ValueError for a key that was not read and could change what the model computes."""
        for key, value in self.items():
            name = key.strip("_")
            words = {*name.lower().split("_")}
            if key in self.read or name in _HARMLESS or not words & _WORDS or is_off(words, value):
                continue
            what = f"{printable(key, 60)} {quoted(value, 60)}"
            raise ValueError(f"{what} is unknown for this architecture, and could change what the model computes")


def is_off(words: set[str], value: Any) -> bool:
    """Whether a value changes nothing: null, false and empty, 1 for a factor, and 0 for anything else."""
    if value is None or value is False or value in ("", [], {}):
        return True
    return isinstance(value, int | float) and value is not True and value == (1 if words & _FACTORS else 0)
