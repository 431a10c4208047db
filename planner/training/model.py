"""The trainable planner: a small Qwen3 decoder whose parameters carry Hugging Face's names.

Training needs no cache and no positions but the row's own: attention is relative (RoPE), and who
sees whom is given by `Visibility`. On CUDA attention is compiled FlexAttention, on a CPU dense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dayshift.planner.training.documents import SYSTEM_GROUP

BLOCK = 128  # FlexAttention's block size

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, T, D) -> (B, H, T, D)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of the model. The default has 7.9M parameters, 15.7 MB in bfloat16."""

    vocab_size: int = 1024
    hidden_size: int = 320
    num_layers: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    rope_theta: float = 1e5
    rms_norm_eps: float = 1e-6
    max_position: int = 16_384  # a window of 8,192 and as much recalled

    def to_hugging_face(self) -> dict[str, Any]:
        """`config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


class Visibility:
    """Which tokens see which, for batches of one fixed shape (see `documents`).

    `update` takes a batch's expiry and group; `attend` is then the attention of that batch.
    """

    def __init__(self, num_rows: int, row_length: int, device: torch.device) -> None:
        self._shape = (num_rows, row_length)
        self._expiry = expiry = torch.zeros(self._shape, dtype=torch.int32, device=device)
        self._group = group = torch.zeros(self._shape, dtype=torch.int32, device=device)
        self._mask: Any = None

        def is_visible(row: Tensor, head: Any, q: Tensor, k: Tensor) -> Tensor:
            group_q, group_k = group[row, q], group[row, k]
            is_in_sight = (group_q == 0) | (group_q == group_k) | (group_k == SYSTEM_GROUP)
            return (k <= q) & (q < expiry[row, k]) & is_in_sight

        self._is_visible = is_visible  # FlexAttention takes plain functions only

    def update(self, expiry: Tensor, group: Tensor) -> None:
        """Load a batch: both (num_rows, row_length) int32."""
        self._expiry.copy_(expiry)
        self._group.copy_(group)
        self._mask = self.block_mask() if self._expiry.is_cuda else self.dense_mask()

    def dense_mask(self) -> Tensor:
        """The loaded batch's visibility, bool, (B, 1, T, T)."""
        num_rows, length = self._shape
        row = torch.arange(num_rows)[:, None, None]
        position = torch.arange(length)
        return self._is_visible(row, None, position[None, :, None], position[None, None, :])[:, None]

    def block_mask(self) -> BlockMask:
        """The same, as the blocks that FlexAttention must visit (partly or wholly visible ones)."""
        num_rows, length = self._shape
        expiry = self._expiry.view(num_rows, 1, -1, BLOCK)  # by key block
        first = torch.arange(0, length, BLOCK, device=expiry.device)
        first_q, first_k = first[:, None], first[None, :]
        is_touched = (first_k <= first_q + BLOCK - 1) & (first_q < expiry.amax(-1))
        is_plain = (self._group == 0).view(num_rows, -1, BLOCK).all(-1)[:, :, None]  # by query block
        is_full = (first_k + BLOCK - 1 <= first_q) & (first_q + BLOCK - 1 < expiry.amin(-1)) & is_plain
        partial, full = is_touched & ~is_full, is_full
        return BlockMask.from_kv_blocks(
            *_ordered(partial), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=self._is_visible
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Grouped-query attention under the loaded batch's visibility."""
        if q.is_cuda:
            return flex_attention(q, k, v, block_mask=self._mask, enable_gqa=True)  # type: ignore[return-value]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=True)


def _ordered(is_wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Number of wanted key blocks per query block, (B, 1, Q), and their indices first, (B, 1, Q, K)."""
    num_blocks = is_wanted.sum(-1, dtype=torch.int32)
    indices = is_wanted.int().argsort(dim=-1, descending=True, stable=True).int()
    return num_blocks[:, None].contiguous(), indices[:, None].contiguous()


class Linear(nn.Linear):
    """No bias; float32 weights are used in the dtype of the activations."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, as Qwen3 has it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        num_rows, length, _ = x.shape
        heads = (num_rows, length, -1, self._head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        return self.o_proj(attend(q, k, v).transpose(1, 2).reshape(num_rows, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class PlannerModel(nn.Module):
    """The whole model; its state dict has `Qwen3ForCausalLM`'s names (the head is the embedding)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * config.num_layers) ** 0.5 if is_output else 0.02
                nn.init.normal_(parameter, 0.0, std)

    def forward(self, ids: Tensor, attend: Attend, dtype: torch.dtype) -> Tensor:
        """Final hidden states, (B, T, hidden), of token ids (B, T)."""
        cos, sin = rope_table(self.config, ids.shape[1], ids.device)
        x = self.model.embed_tokens(ids).to(dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return self.model.norm(x)


def rope_table(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32, (length, head_dim), from angles in float64."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float64) / config.head_dim
    angle = torch.arange(length, device=device, dtype=torch.float64)[:, None] * config.rope_theta**-exponent
    angle = torch.cat((angle, angle), -1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout on (B, H, T, D); float32 inside."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def weighted_loss(hidden: Tensor, embedding: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, weighted by the weight of the predicted token."""
    logits = F.linear(hidden[:, :-1], embedding.to(hidden.dtype)).float()
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    wanted = weight[:, 1:].flatten().float()
    return (loss * wanted).sum() / wanted.sum().clamp(min=1)


def predictions(hidden: Tensor, embedding: Tensor) -> Tensor:
    """Greedy next token after each position, (B, T)."""
    return F.linear(hidden, embedding.to(hidden.dtype)).argmax(-1)
