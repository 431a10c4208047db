"""The VLM's text layers, run once per chunk over the prefix: images, instruction, robot state.

Only their keys and values are wanted (the action expert reads them), so the last layer has no
attention and no MLP here, and the final norm and the language head are not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from dayshift.policy.smolvla.attention import KeyMask, attend
from dayshift.policy.smolvla.config import LayerShape, SmolVLAConfig
from dayshift.policy.smolvla.heads import KVSlots, Rotary, rotate, split_heads
from dayshift.policy.smolvla.layers import RmsNorm, SelfAttentionLayer


class KeyValueLayer(nn.Module):
    """The last text layer, as far as its keys and values."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.input_layernorm = RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.kv_proj = nn.Linear(shape.hidden_size, 2 * shape.kv_size, bias=shape.attention_bias)

    def project(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, each (batch, kv_heads, length, head_dim)."""
        k, v = self.kv_proj(self.input_layernorm(hidden)).chunk(2, dim=-1)
        return rotate(split_heads(k, self.head_dim), rotary), split_heads(v, self.head_dim)


class TextLayers(nn.Module):
    """Token embeddings and layers of the VLM."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        self.shape = shape = config.text_shape
        self.embed_tokens = nn.Embedding(config.vlm.text_config.vocab_size, shape.hidden_size)
        full = [SelfAttentionLayer(shape) for _ in range(config.num_text_layers - 1)]
        self.layers = nn.ModuleList([*full, KeyValueLayer(shape)])

    def keys_values(
        self, hidden: Tensor, rotary: Rotary, mask: KeyMask, places: Mapping[int, KVSlots]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's rotated keys and values over the prefix (batch, length, hidden_size), in order.

        They are written into the layer's `places`, if it has any. Overwrites `hidden`.
        """
        for index, layer in enumerate(self.layers):
            if isinstance(layer, SelfAttentionLayer):
                slots = places.get(index) or self._new_slots(hidden)
                q = layer.project(hidden, rotary, slots)
                yield slots
                hidden = layer.finish(hidden, attend(q, *slots, mask))
            elif isinstance(layer, KeyValueLayer):
                k, v = layer.project(hidden, rotary)
                if (slots := places.get(index)) is not None:
                    slots.keys.copy_(k)
                    slots.values.copy_(v)
                yield k, v

    def _new_slots(self, hidden: Tensor) -> KVSlots:
        """Heads side by side for each token, as a projection of them reads it."""
        shape = (*hidden.shape[:2], self.shape.num_kv_heads, self.shape.head_dim)
        return KVSlots(hidden.new_empty(shape).transpose(1, 2), hidden.new_empty(shape).transpose(1, 2))
