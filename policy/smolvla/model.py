"""SmolVLA: a prefix encoded once, then Euler steps of flow matching over the action chunk.

    images ──► vision tower ──► connector ─┐
    instruction ──► embedding ─────────────┼─► text layers ──► PrefixCache (keys, values)
    robot state ──► linear ────────────────┘                        │ read by every layer, every step
    noise ──► [ + time ──► action expert ──► velocity ──► Euler step ] x num_steps ──► action chunk

Shapes depend on the batch's shape only, nothing is read back to the host, and `denoise` works in buffers that
are allocated before: `encode_prefix` and `denoise` can each be captured in a CUDA graph.

Source: Shukor et al., arXiv:2506.01844; flow matching as in Black et al., arXiv:2410.24164.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dayshift.policy.smolvla.attention import KeyMask
from dayshift.policy.smolvla.config import SmolVLAConfig
from dayshift.policy.smolvla.expert import ActionExpert, PrefixCache
from dayshift.policy.smolvla.guidance import Guidance
from dayshift.policy.smolvla.layers import RotaryTable
from dayshift.policy.smolvla.text import TextLayers
from dayshift.policy.smolvla.vision import Connector, VisionTower


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixInputs:
    """A batch of observations. What a mask leaves out may hold any finite number."""

    images: Tensor  # (batch, num_images, tokens_per_image, hidden_size) of `embed_images`, its own first
    image_mask: Tensor  # bool (batch, num_images)
    empty_mask: Tensor  # bool (batch, empty_cameras): which empty cameras lerobot would add
    token_ids: Tensor  # int64 (batch, text_length)
    token_mask: Tensor  # bool (batch, text_length)
    state: Tensor  # float32 (batch, max_state_dim), normalised and padded with zeros


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Ids of the special tokens around an image (only with `add_image_special_tokens`)."""

    fake_id: int
    global_id: int


class SmolVLA(nn.Module):
    """The whole network. `sample_actions` is `encode_prefix` followed by `denoise`."""

    special_ids: Tensor
    time_features: Tensor

    def __init__(
        self, config: SmolVLAConfig, max_text_length: int, num_steps: int, image_tokens: ImageTokens | None
    ) -> None:
        super().__init__()
        policy = config.policy
        text_size, expert_size = config.text_shape.hidden_size, config.expert_shape.hidden_size
        self.config = config
        self.num_steps = num_steps
        self.vision = VisionTower(config.vlm.vision_config, config.patch_grid)
        self.connector = Connector(config)
        self.text = TextLayers(config)
        self.expert = ActionExpert(config)
        self.state_proj = nn.Linear(policy.max_state_dim, text_size)
        self.action_in_proj = nn.Linear(policy.max_action_dim, expert_size)
        self.action_time_mlp_in = nn.Linear(2 * expert_size, expert_size)
        self.action_time_mlp_out = nn.Linear(expert_size, expert_size)
        self.action_out_proj = nn.Linear(expert_size, policy.max_action_dim)

        special = (image_tokens.fake_id, image_tokens.global_id, image_tokens.fake_id) if image_tokens else ()
        cpu = torch.device("cpu")
        self.register_buffer(
            "special_ids", torch.tensor(special, dtype=torch.int64, device=cpu), persistent=False
        )
        features = time_features(num_steps, expert_size, policy.min_period, policy.max_period)
        self.register_buffer("time_features", features, persistent=False)
        num_images = len(config.cameras)
        longest = self.prefix_length(num_images, max_text_length) + policy.chunk_size
        self.rotary = RotaryTable(config.text_shape.head_dim, longest)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the activations and the cache."""
        return self.state_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.state_proj.weight.device

    def prefix_length(self, num_images: int, text_length: int) -> int:
        """Tokens of a prefix, masked ones included."""
        num_special = len(self.special_ids)
        image_length = num_images * (self.config.tokens_per_image + num_special)
        return image_length + self.config.policy.empty_cameras * num_special + text_length + 1

    def allocate_cache(self, batch_size: int, num_images: int, text_length: int) -> PrefixCache:
        """Buffers for batches of this shape; they may be used again."""
        length = self.prefix_length(num_images, text_length)
        return PrefixCache.allocate(self.config, batch_size, length, self.dtype, self.device)

    @torch.inference_mode()
    def sample_actions(self, inputs: PrefixInputs, noise: Tensor, guidance: Guidance | None = None) -> Tensor:
        """float32 noise (batch, chunk_size, max_action_dim) -> normalised actions, same shape and dtype."""
        batch, num_images = inputs.image_mask.shape
        cache = self.allocate_cache(batch, num_images, inputs.token_ids.shape[1])
        self.encode_prefix(inputs, cache)
        return self.denoise(noise, cache, guidance=guidance)

    @torch.inference_mode()
    def embed_images(self, patches: Tensor) -> Tensor:
        """Patches (batch, num_images, *of_image) in [-1, 1] -> what the text layers see of them, (batch,
        num_images, tokens_per_image, hidden_size). An image's tokens depend on nothing else."""
        scale = math.sqrt(self.config.text_shape.hidden_size)
        tokens = self.connector(self.vision(patches.flatten(0, 1).to(self.dtype))) * scale
        return tokens.unflatten(0, patches.shape[:2])

    @torch.inference_mode()
    def encode_prefix(self, inputs: PrefixInputs, cache: PrefixCache) -> None:
        """Run the text layers once and fill `cache`."""
        hidden, valid = self._embed_prefix(inputs)
        positions = valid.cumsum(1) - 1
        rotary = self.rotary(positions.clamp(min=0))
        mask, places = self._prefix_mask(valid, hidden), self.expert.prefix_places(cache)
        for text_layer, (k, v) in enumerate(self.text.keys_values(hidden, rotary, mask, places)):
            self.expert.store_prefix(text_layer, k, v, cache)
        action_positions = valid.sum(1, keepdim=True) + self._action_positions()
        cache.set_prefix(valid, self.rotary(action_positions))

    @torch.inference_mode()
    def denoise(
        self,
        actions: Tensor,
        cache: PrefixCache,
        steps: range | None = None,
        guidance: Guidance | None = None,
    ) -> Tensor:
        """Integrate the velocity from t=1 (noise) to t=0 (actions) in `num_steps` Euler steps.

        With `steps`, only these of them: what one call returns is the next one's `actions`.
        """
        rotary = self.rotary(self._action_positions())
        half = self.action_time_mlp_in.weight.shape[0]
        action_weight, time_weight = self.action_time_mlp_in.weight.split(half, dim=1)
        # The time's half of the first layer is the same for every robot and action.
        times = F.linear(self.time_features.to(self.dtype), time_weight, self.action_time_mlp_in.bias)
        for step in steps or range(self.num_steps):
            hidden = F.linear(self.action_in_proj(actions.to(self.dtype)), action_weight) + times[step]
            hidden = self.action_time_mlp_out(F.silu(hidden))
            velocity = self.action_out_proj(self.expert(hidden, cache, rotary)).float()
            if guidance is not None:
                velocity = guidance.correct(velocity, actions, flow_time(step, self.num_steps))
            actions = actions - velocity / self.num_steps
        return actions

    def _action_positions(self) -> Tensor:
        return torch.arange(self.config.policy.chunk_size, device=self.device)[None]

    def _embed_prefix(self, inputs: PrefixInputs) -> tuple[Tensor, Tensor]:
        """Embeddings (batch, prefix_length, hidden_size) and which of them are there, bool."""
        batch = len(inputs.state)
        text = self.text.embed_tokens(inputs.token_ids) * math.sqrt(self.config.text_shape.hidden_size)
        state = self.state_proj(inputs.state.to(self.dtype))[:, None]
        special = self.text.embed_tokens(self.special_ids)  # not scaled, as in lerobot
        start, end = special[:2], special[2:]
        around = inputs.image_mask.shape
        images = torch.cat(
            (start.expand(*around, -1, -1), inputs.images, end.expand(*around, -1, -1)), dim=2
        )  # (batch, num_images, tokens with special ones, hidden_size)
        empty = special.expand(*inputs.empty_mask.shape, -1, -1)
        hidden = torch.cat((images.flatten(1, 2), empty.flatten(1, 2), text, state), dim=1)
        valid = torch.cat(
            (
                inputs.image_mask.repeat_interleave(images.shape[2], dim=1),
                inputs.empty_mask.repeat_interleave(len(special), dim=1),
                inputs.token_mask,
                inputs.token_mask.new_ones(batch, 1),
            ),
            dim=1,
        )
        return hidden, valid

    def _prefix_mask(self, valid: Tensor, like: Tensor) -> KeyMask:
        """Images and text see each other; the state, last, sees all and is seen by itself alone."""
        batch, length = valid.shape
        mask = KeyMask.allocate(batch, self.config.text_shape, length, length, length - 1, like)
        mask.fill(valid, length)
        return mask


def flow_time(step: int, num_steps: int) -> float:
    """Where on the way from noise (1) to actions (0) an Euler step begins."""
    return 1.0 + step * (-1.0 / num_steps)


def time_features(num_steps: int, size: int, min_period: float, max_period: float) -> Tensor:
    """Sines and cosines of the flow time of every Euler step, float32 (num_steps, size).

    feature(t, i) = sin or cos of 2π t / period_i, with periods in geometric progression.
    """
    cpu = torch.device("cpu")
    fractions = torch.linspace(0.0, 1.0, size // 2, dtype=torch.float64, device=cpu)
    periods = min_period * (max_period / min_period) ** fractions
    times = torch.tensor([flow_time(step, num_steps) for step in range(num_steps)], device=cpu)
    angles = times[:, None] * (2 * math.pi / periods)
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()
