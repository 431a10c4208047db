"""The vision tower (SigLIP) and the connector that turns its patches into text-sized tokens."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dayshift.policy.smolvla.config import SmolVLAConfig, VisionConfig
from dayshift.policy.smolvla.heads import join_heads, split_heads
from dayshift.policy.smolvla.layer_norm import offset_layer_norm

# In this order on CUDA: without a mask cuDNN is about twice as fast as torch's flash kernel on Hopper.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class VisionLayer(nn.Module):
    """Pre-norm bidirectional attention and MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_attention_heads
        self.layer_norm1 = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.qkv_proj = nn.Linear(size, 3 * size)
        self.out_proj = nn.Linear(size, size)
        self.layer_norm2 = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, size)

    def add_attention(self, hidden: Tensor, normed: Tensor) -> None:
        """Add the attention's part, without its bias, to (num_images, num_patches, hidden_size)."""
        parts = self.qkv_proj(normed).chunk(3, dim=-1)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)
        with sdpa_kernel(_BACKENDS, set_priority=True) if q.is_cuda else nullcontext():
            attended = F.scaled_dot_product_attention(q, k, v)
        add_product(hidden, self.out_proj.weight, join_heads(attended))

    def add_mlp(self, hidden: Tensor, normed: Tensor) -> None:
        """Add the MLP's part, without its bias."""
        add_product(hidden, self.fc2.weight, linear_gelu(self.fc1, normed))


def add_product(hidden: Tensor, weight: Tensor, x: Tensor) -> None:
    """hidden += x weight^T, both (…, size), in one launch."""
    hidden.view(-1, hidden.shape[-1]).addmm_(x.flatten(0, -2), weight.t())


def linear_gelu(linear: nn.Linear, x: Tensor) -> Tensor:
    """gelu(linear(x)), approximated by tanh; on CUDA at the end of the product's own launch."""
    if not x.is_cuda:
        return F.gelu(linear(x), approximate="tanh")
    rows = torch.ops.aten._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], -1)


class VisionTower(nn.Module):
    """Images to patch features. Source: Zhai et al., arXiv:2303.15343 (SigLIP)."""

    position_ids: Tensor

    def __init__(self, config: VisionConfig, patch_grid: int) -> None:
        super().__init__()
        positions_per_side = config.image_size // config.patch_size
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, config.patch_size, stride=config.patch_size
        )
        self.position_embedding = nn.Embedding(positions_per_side**2, config.hidden_size)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        ids = grid_position_ids(patch_grid, positions_per_side)
        self.register_buffer("position_ids", ids, persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        """(num_images, num_patches, values of a patch) as of `images_to_patches` -> the same with
        hidden_size in the last place."""
        positions = self.position_embedding(self.position_ids)
        hidden = positions.expand(len(patches), -1, -1).contiguous()
        add_product(hidden, self.patch_embedding.weight.flatten(1), patches)  # the convolution
        layers = [layer for layer in self.layers if isinstance(layer, VisionLayer)]
        offsets = iter(self._offsets(layers))  # of `hidden`: what it lacks before each norm
        for layer in layers:
            layer.add_attention(hidden, offset_layer_norm(hidden, next(offsets), layer.layer_norm1))
            layer.add_mlp(hidden, offset_layer_norm(hidden, next(offsets), layer.layer_norm2))
        return offset_layer_norm(hidden, next(offsets), self.post_layernorm)

    def _offsets(self, layers: list[VisionLayer]) -> Tensor:
        """Sums of the biases so far: of the patches, then of each attention and MLP, float32."""
        biases = [self.patch_embedding.bias]
        for layer in layers:
            biases += (layer.out_proj.bias, layer.fc2.bias)
        return torch.stack([bias for bias in biases if bias is not None]).cumsum(0, dtype=torch.float32)


def grid_position_ids(patch_grid: int, positions_per_side: int) -> Tensor:
    """Position id of every patch of a square image, int64 (patch_grid²,).

    An image of another size than the tower was trained at spreads over the same positions. The borders
    are rounded in float32 as transformers rounds them: they decide which position a patch gets.
    """
    cpu = torch.device("cpu")
    step = 1 / positions_per_side
    borders = torch.arange(step, 1.0, step, device=cpu)
    per_patch = 1.0 / torch.tensor(patch_grid, device=cpu)
    coordinates = torch.arange(patch_grid, dtype=torch.float32, device=cpu) * per_patch
    buckets = torch.bucketize(coordinates.clamp(max=1.0 - 1e-6), borders, right=True)
    return (buckets[:, None] * positions_per_side + buckets[None, :]).flatten()


class Connector(nn.Module):
    """Pixel shuffle, then one projection: scale² neighbouring patches become one token."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        self.scale = config.vlm.scale_factor
        self.patch_grid = config.patch_grid
        size = config.vlm.vision_config.hidden_size * self.scale**2
        self.proj = nn.Linear(size, config.vlm.text_config.hidden_size, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """(num_images, patch_grid², vision size) -> (num_images, tokens_per_image, text size)."""
        side = self.patch_grid // self.scale
        x = patches.unflatten(1, (side, self.scale, side, self.scale))  # rows, then columns
        x = x.transpose(2, 3)  # (num_images, side, side, scale, scale, vision size)
        return self.proj(x.flatten(3).flatten(1, 2))
