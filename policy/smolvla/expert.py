"""The action expert: a small transformer over the noisy action chunk that reads the prefix.

Its layers alternate. Self-attention layers see the prefix's keys and values as the text layer left them,
then their own tokens, causally. Cross-attention layers see the prefix only, through a projection
that does not depend on the actions and is therefore computed once per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dayshift.policy.smolvla.attention import KeyMask, attend
from dayshift.policy.smolvla.config import LayerShape, SmolVLAConfig
from dayshift.policy.smolvla.heads import KVSlots, Rotary, join_heads, place_heads, split_heads
from dayshift.policy.smolvla.layers import AttentionLayer, RmsNorm, SelfAttentionLayer, normed_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """What a batch's denoising reads of its prefix: buffers of fixed size, filled in place.

    The last `chunk_size` key and value slots are scratch: self-attention layers write the
    keys and values of the noisy actions there in every denoising step.
    """

    keys: Tensor  # (num_expert_layers, batch, kv_heads, prefix_length + chunk_size, head_dim)
    values: Tensor  # as keys
    mask: KeyMask  # of chunk_size queries and prefix_length + chunk_size keys
    action_cos: Tensor  # float32 (batch, 1, chunk_size, head_dim / 2): the actions follow the prefix
    action_sin: Tensor  # as action_cos
    prefix_length: int

    @classmethod
    def allocate(
        cls,
        config: SmolVLAConfig,
        batch_size: int,
        prefix_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PrefixCache:
        """Buffers for one batch shape."""
        shape, chunk = config.expert_shape, config.policy.chunk_size
        length = prefix_length + chunk
        kv = (len(config.expert_plan), batch_size, shape.num_kv_heads, length, shape.head_dim)
        rotary = (batch_size, 1, chunk, shape.head_dim // 2)
        keys = torch.zeros(kv, dtype=dtype, device=device)
        return cls(
            keys=keys,
            values=torch.zeros_like(keys),
            mask=KeyMask.allocate(batch_size, shape, chunk, length, prefix_length, keys),
            action_cos=torch.zeros(rotary, device=device),
            action_sin=torch.zeros(rotary, device=device),
            prefix_length=prefix_length,
        )

    def first(self, batch_size: int) -> PrefixCache:
        """The part that belongs to the first robots, for a smaller batch."""
        return PrefixCache(
            keys=self.keys[:, :batch_size],
            values=self.values[:, :batch_size],
            mask=self.mask.first(batch_size),
            action_cos=self.action_cos[:batch_size],
            action_sin=self.action_sin[:batch_size],
            prefix_length=self.prefix_length,
        )

    def set_prefix(self, valid: Tensor, action_rotary: Rotary) -> None:
        """Masks and positions from which prefix tokens are there, bool (batch, prefix_length)."""
        self.mask.fill(valid, self.action_cos.shape[2])
        self.action_cos.copy_(action_rotary.cos)
        self.action_sin.copy_(action_rotary.sin)

    def prefix_slots(self, index: int) -> KVSlots:
        """Where the prefix's keys and values of an expert layer lie."""
        length = self.prefix_length
        return KVSlots(self.keys[index, :, :, :length], self.values[index, :, :, :length])


class ExpertSelfLayer(SelfAttentionLayer):
    """Attends to the prefix and, causally, to the actions."""

    def forward(self, hidden: Tensor, cache: PrefixCache, index: int, rotary: Rotary) -> Tensor:
        """(batch, chunk_size, hidden_size) -> the same. Writes the cache's scratch slots."""
        scratch = KVSlots(
            cache.keys[index, :, :, cache.prefix_length :], cache.values[index, :, :, cache.prefix_length :]
        )
        q = self.project(hidden, Rotary(cache.action_cos, cache.action_sin), scratch)
        return self.finish(hidden, attend(q, cache.keys[index], cache.values[index], cache.mask))


class ExpertCrossLayer(AttentionLayer):
    """Attends to the prefix only."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.q_proj = nn.Linear(shape.hidden_size, shape.q_size, bias=shape.attention_bias)
        self.k_proj = nn.Linear(shape.kv_size, shape.kv_size, bias=shape.attention_bias)
        self.v_proj = nn.Linear(shape.kv_size, shape.kv_size, bias=shape.attention_bias)

    def store_prefix(self, k: Tensor, v: Tensor, cache: PrefixCache, index: int) -> None:
        """Project the text layer's (rotated) keys and values once, for all denoising steps."""
        head_dim = self.shape.head_dim
        slots = cache.prefix_slots(index)
        slots.keys.copy_(split_heads(self.k_proj(join_heads(k)), head_dim))
        slots.values.copy_(split_heads(self.v_proj(join_heads(v)), head_dim))

    def forward(self, hidden: Tensor, cache: PrefixCache, index: int, rotary: Rotary) -> Tensor:
        """(batch, chunk_size, hidden_size) -> the same; `rotary` counts the actions from 0."""
        rows, norm = normed_linear(self.q_proj, self.input_layernorm, hidden)
        q = place_heads(rows, rotary, self.shape.num_heads, norm=norm)
        return self.finish(hidden, attend(q, *cache.prefix_slots(index), cache.mask.open_keys()))


class ActionExpert(nn.Module):
    """The expert's layers and final norm."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        shape = config.expert_shape
        self.plan = config.expert_plan
        self.layers = nn.ModuleList(
            ExpertSelfLayer(shape) if plan.is_self_attention else ExpertCrossLayer(shape)
            for plan in self.plan
        )
        self.norm = RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def prefix_places(self, cache: PrefixCache) -> dict[int, KVSlots]:
        """By text layer, where its keys and values are wanted as they are: for self-attention."""
        return {
            plan.text_layer: cache.prefix_slots(index)
            for index, plan in enumerate(self.plan)
            if plan.is_self_attention
        }

    def store_prefix(self, text_layer: int, k: Tensor, v: Tensor, cache: PrefixCache) -> None:
        """Let the cross-attention layer that reads a text layer, if any does, project its keys and values."""
        for index, (plan, layer) in enumerate(zip(self.plan, self.layers, strict=True)):
            if plan.text_layer == text_layer and isinstance(layer, ExpertCrossLayer):
                layer.store_prefix(k, v, cache, index)

    def forward(self, hidden: Tensor, cache: PrefixCache, rotary: Rotary) -> Tensor:
        """(batch, chunk_size, hidden_size) -> the same; `rotary` counts the actions from 0.

        Overwrites `hidden`.
        """
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cache, index, rotary)
        return self.norm(hidden)
