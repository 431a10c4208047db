"""One decoder for the Llama, Qwen, gpt-oss and Gemma families.

The layers call `engine.kernels` only, so that CPU (torch twins) and CUDA (Triton) run the same
code. Keys are stored un-rotated; attention rotates them on load by their index in the sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dayshift.engine import kernels
from dayshift.engine.kernels import token_attention
from dayshift.engine.models.config import Activation, ModelConfig, MoeConfig
from dayshift.engine.models.linear import Embedding, Linear
from dayshift.engine.models.rope import cos_sin_table, local_cos_sin_table
from dayshift.engine.models.shard import WHOLE, Shard

Pools = tuple[Tensor, Tensor]  # keys, values


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Where the tokens of one step stand. All tensors int32 (slot_mapping int64), on the device.

    A step mixes prefill chunks and decodes; tokens of a sequence are consecutive.
    """

    positions: Tensor  # (num_tokens,) index in its sequence
    slot_mapping: Tensor  # (num_tokens,) block_id * block_size + offset
    block_tables: Tensor  # (num_seqs, max_blocks)
    seq_lens: Tensor  # (num_seqs,) context length, this step's tokens included
    query_start: Tensor  # (num_seqs + 1,) cumulative number of tokens
    prompt_lengths: tuple[int, ...] | None = None
    """Tokens of each sequence, if all of them begin in this step: then no key comes from the pool."""

    def of_each_token(self) -> Iterator[AttentionBatch]:
        """The step as one of a single token for each, in order. Reads from the device."""
        place = torch.arange(len(self.positions), device=self.positions.device)
        last = len(self.seq_lens) - 1  # where padding tokens stand, behind all sequences
        sequences = torch.searchsorted(self.query_start, place, right=True).sub_(1).clamp_(max=last)
        alone = torch.tensor([0, 1], dtype=torch.int32, device=place.device)
        for token, sequence in enumerate(sequences.tolist()):
            yield AttentionBatch(
                positions=self.positions[token : token + 1],
                slot_mapping=self.slot_mapping[token : token + 1],
                block_tables=self.block_tables[sequence : sequence + 1],
                seq_lens=self.positions[token : token + 1] + 1,
                query_start=alone,
            )


class GatedMlp(nn.Module):
    """down(activation(gate(x), up(x))), gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation: Activation = config.activation
        self.eps = config.rms_norm_eps
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The MLP of the normed sum of hidden and residual; and the sum."""
        inner, residual = self.gate_up_proj.gated_after_norm(
            hidden, residual, norm, self.eps, self.activation
        )
        return self.down_proj(inner), residual


class SparseMoe(nn.Module):
    """A router and many small gated MLPs, of which every token passes a few (Qwen3-MoE, gpt-oss)."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe
        self.eps = config.rms_norm_eps
        self.activation: Activation = config.activation
        num_experts, size, hidden = moe.num_experts, moe.intermediate_size, config.hidden_size
        self.router = Linear(hidden, num_experts, bias=moe.has_bias)
        self.experts_gate_up = nn.Parameter(torch.empty(num_experts, 2 * size, hidden))
        self.experts_down = nn.Parameter(torch.empty(num_experts, hidden, size))
        self.experts_gate_up_bias = self.experts_down_bias = None
        if moe.has_bias:
            self.experts_gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * size))
            self.experts_down_bias = nn.Parameter(torch.empty(num_experts, hidden))

    def forward(self, hidden: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of the normed sum of hidden and residual; and the sum."""
        return kernels.norm_moe(
            hidden,
            residual,
            norm,
            self.eps,
            self.router.weight,
            self.experts_gate_up,
            self.experts_down,
            self.moe.num_experts_per_token,
            self.moe.is_top_k_normalized,
            router_bias=self.router.bias,
            gate_up_bias=self.experts_gate_up_bias,
            down_bias=self.experts_down_bias,
            activation=self.activation,
        )


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP or experts. Takes and returns (hidden, residual), see `Decoder.forward`."""

    def __init__(self, config: ModelConfig, index: int, shard: Shard) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.window = config.window_of_layer(index)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.input_norm = _norm(config.hidden_size)
        self.qkv_proj = Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.has_qkv_bias)
        self.q_norm = _norm(config.head_dim) if config.has_qk_norm else None
        self.k_norm = _norm(config.head_dim) if config.has_qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.has_sinks else None
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.has_o_bias)
        self.attention_output_norm = _norm(config.hidden_size) if config.has_output_norms else None
        self.mlp_norm = _norm(config.hidden_size)
        self.mlp = GatedMlp(config) if config.moe is None else SparseMoe(config, config.moe)
        self.mlp_output_norm = _norm(config.hidden_size) if config.has_output_norms else None

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        batch: AttentionBatch,
        kv: Pools,
        cos_sin: Tensor,
        last_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`kv` is this layer's keys and values, each (num_blocks, block_size, num_kv_heads, head_dim).

        With `last_tokens`, as in `Decoder.forward`, all tokens' KV is stored and only these go on.
        """
        eps = self.config.rms_norm_eps
        qkv, residual = self.qkv_proj.after_norm(hidden, residual, self.input_norm, eps)
        hidden = self.shard.all_reduce(self.o_proj(self._attend(qkv, batch, kv, cos_sin, last_tokens)))
        if last_tokens is not None:
            residual = residual[last_tokens]
        return self.after_attention(hidden, residual)

    def after_attention(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The rest of the layer, from what the output projection gives."""
        eps = self.config.rms_norm_eps
        if self.attention_output_norm is not None:
            hidden = kernels.rms_norm(hidden, self.attention_output_norm, eps)
        hidden, residual = self.mlp(hidden, residual, self.mlp_norm)
        hidden = self.shard.all_reduce(hidden)
        if self.mlp_output_norm is not None:
            hidden = kernels.rms_norm(hidden, self.mlp_output_norm, eps)
        return hidden, residual

    def attends_at_once(self, qkv: Tensor, batch: AttentionBatch, kv: Pools) -> bool:
        """What lies between the projections is one launch: on a GPU, for few single queries, unless they are
        to have the same bits in every batch."""
        return (
            qkv.is_cuda
            and not kernels.is_batch_invariant()
            and token_attention.can_attend(
                len(qkv), self.config.num_heads, self.config.head_dim, qkv.dtype, kv[0], batch.block_tables
            )
        )

    def heads(self) -> token_attention.Heads:
        """What such a launch needs of the layer."""
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        return token_attention.Heads(
            scale=self.config.attention_scale,
            window=self.window,
            sinks=self.sinks,
            norms=norms,
            eps=self.config.rms_norm_eps,
        )

    def _attend(
        self, qkv: Tensor, batch: AttentionBatch, kv: Pools, cos_sin: Tensor, last_tokens: Tensor | None
    ) -> Tensor:
        """(num_tokens, sum of split_sizes) -> (num_tokens, num_heads * head_dim), with `last_tokens` of these
        alone; stores the KV of all."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        is_plain = self.sinks is None and self.window is None
        if batch.prompt_lengths is not None and is_plain and last_tokens is None:
            if self.q_norm is not None and self.k_norm is not None:
                q = kernels.rms_norm(q, self.q_norm, config.rms_norm_eps)
                k = kernels.rms_norm(k, self.k_norm, config.rms_norm_eps)
            q = kernels.rope_store_kv(q, k, v, batch.positions, cos_sin, *kv, batch.slot_mapping)
            k = kernels.rope(k, batch.positions, cos_sin)
            out = kernels.prompt_attention(q, k, v, batch.prompt_lengths, config.attention_scale)
            return out.reshape(len(qkv), -1)

        if last_tokens is None and self.attends_at_once(qkv, batch, kv):
            place = (batch.slot_mapping, batch.block_tables, batch.seq_lens, cos_sin)
            return token_attention.attend(q, k, v, self.heads(), *kv, *place)

        place = (batch.positions, cos_sin, *kv, batch.slot_mapping)
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm, self.k_norm, config.rms_norm_eps)
            q = kernels.norm_rope_store_kv(q, k, v, *norms, *place)
        else:
            q = kernels.rope_store_kv(q, k, v, *place)
        query_start = batch.query_start
        if last_tokens is not None:
            q = q[last_tokens]
            query_start = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        out = kernels.paged_attention(
            q,
            *kv,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            query_start=query_start,
            cos_sin=cos_sin,
            scale=config.attention_scale,
            sinks=self.sinks,
            window=self.window,
        )
        return out.view(len(q), -1)


def _go_on(_: int) -> None:
    """The layers' KV is in the pool already."""


class Decoder(nn.Module):
    """Token ids in, hidden states out; `logits` is the head.

    `config` is the shape of this process's `shard`: all of a model, or a part beside others.
    """

    is_batch_invariant = False
    """A token's results have the same bits whatever else the step computes. On a CPU, whose libraries
    choose their sums by shape, tokens are computed one after the other for that."""

    cos_sin: Tensor
    local_cos_sin: Tensor | None
    """Cosines and sines of the layers with a sliding window, where these rotate otherwise."""

    def __init__(self, config: ModelConfig, num_positions: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index, shard) for index in range(config.num_layers))
        self.layer_ids: Sequence[int] = range(config.num_layers)  # where their KV is in the pool
        self.norm = _norm(config.hidden_size)
        self.lm_head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("cos_sin", torch.empty(num_positions, config.head_dim), persistent=False)
        self.register_buffer("local_cos_sin", None, persistent=False)

    def fill_position_table(self) -> None:
        """Compute the cosines and sines (float32 whatever the dtype of the weights)."""
        num_positions, device = self.cos_sin.shape[0], self.cos_sin.device
        self.cos_sin = cos_sin_table(self.config, num_positions).to(device)
        local = local_cos_sin_table(self.config, num_positions)
        self.local_cos_sin = None if local is None else local.to(device)

    def one_layer_of_each_kind(self) -> Decoder:
        """The same model on the same weights, with only the first layer of each kind, and the last, which may
        compute less: whatever the number of tokens, it launches the same kernels."""
        first: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            first.setdefault(f"{layer.window} {layer}", index)
        model = copy.copy(self)
        model.layer_ids = [*first.values(), len(self.layers) - 1]
        layers = nn.ModuleList(self.layers[index] for index in model.layer_ids)
        model._modules = self._modules | {"layers": layers}
        return model

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_pool: Tensor,
        before_layer: Callable[[int], object] = _go_on,
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        """int64 (num_tokens,) -> (num_tokens, hidden_size); writes the tokens' KV into `kv_pool`.

        `kv_pool` is (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim). `before_layer` is called
        with each layer's index there, before its KV is read. With `last_tokens`, int64 (num_seqs,), where
        each sequence's last token is, only theirs are returned, (num_seqs, hidden_size), and the last layer
        computes nothing but KV for the others (as llama.cpp does). A sequence without tokens may name any.
        """
        if not self.is_batch_invariant:
            return self._hidden(token_ids, batch, kv_pool, before_layer, last_tokens)
        if token_ids.is_cuda:
            with kernels.batch_invariance(True):
                # Whole prompts must not attend in another order than their chunks would.
                batch = replace(batch, prompt_lengths=None)
                return self._hidden(token_ids, batch, kv_pool, before_layer, last_tokens)
        steps = zip(token_ids.split(1), batch.of_each_token(), strict=True)
        hidden = torch.cat([self._hidden(token_id, one, kv_pool, before_layer) for token_id, one in steps])
        return hidden if last_tokens is None else hidden[last_tokens]

    def _hidden(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_pool: Tensor,
        before_layer: Callable[[int], object],
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        hidden, residual = self._embed(token_ids)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=hidden.dtype)
        final = len(self.layers) - 1
        for place, (layer, index) in enumerate(zip(self.layers, self.layer_ids, strict=True)):
            before_layer(index)
            kv = (kv_pool[0, index], kv_pool[1, index])
            is_local = layer.window is not None and self.local_cos_sin is not None
            cos_sin = self.local_cos_sin if is_local else self.cos_sin
            going_on = last_tokens if place == final else None
            hidden, residual = layer(hidden, residual, batch, kv, cos_sin, going_on)
        hidden, _ = kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps, residual)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(num_rows, hidden_size) -> (num_rows, vocab_size), of the whole vocabulary."""
        if not self.is_batch_invariant:
            return self._head(hidden)
        if hidden.is_cuda:
            with kernels.batch_invariance(True):
                return self._head(hidden)
        # A row of its own, because sums depend on where in memory a row begins, too.
        return torch.cat([self._head(row.clone()) for row in hidden.split(1)])

    def _head(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None:
            return self.shard.gather_columns(kernels.linear(hidden, self.embed.weight))
        return self.shard.gather_columns(self.lm_head(hidden))

    def _embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the residual stream that nothing has been added to."""
        if self.shard.size == 1:
            return kernels.embed(self.embed.weight, token_ids)
        row = token_ids - self.shard.rank * self.config.vocab_size
        is_here = (row >= 0) & (row < self.config.vocab_size)
        hidden, residual = kernels.embed(self.embed.weight, row * is_here)
        return self.shard.all_reduce(hidden * is_here[:, None]), residual


def _norm(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size), requires_grad=False)
