"""A decoder with llama.cpp's arithmetic, for checking one engine's text against the other's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dayshift.engine import kernels
from dayshift.engine.models import llama_cpp_ops as ops
from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import AttentionBatch, Decoder, DecoderLayer, GatedMlp, Pools
from dayshift.engine.models.formats import is_gguf, load_model_config
from dayshift.engine.models.linear import Linear
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.models.quantized import QuantizedLinear
from dayshift.types import DayshiftError


class BlockLinear(nn.Module):
    """A `QuantizedLinear` without bias whose products are llama.cpp's."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.matrices = [ops.block_matrix(matrix) for matrix in layer.parts.matrices]

    def forward(self, x: Tensor) -> Tensor:
        """(num_tokens, num_columns) -> (num_tokens, num_rows of all matrices)."""
        return torch.cat([ops.product(x, matrix) for matrix in self.matrices], dim=1)


class LlamaCppDecoder(Decoder):
    """A Llama in float32 on a CPU, computed with the bits of llama.cpp's CPU path.

    That is its path without flash attention, with float32 keys and values, one sequence at a time: a
    sequence's tokens of one step are llama.cpp's micro-batch.
    """

    def fill_position_table(self) -> None:
        """Compute the cosines and sines."""
        config = self.config
        self.cos_sin = ops.rope_angles(len(self.cos_sin), config.head_dim, config.rope_theta)

    def _hidden(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_pool: Tensor,
        before_layer: Callable[[int], object],
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        hidden, eps = self.embed(token_ids), self.config.rms_norm_eps
        for layer, index in zip(self.layers, self.layer_ids, strict=True):
            before_layer(index)
            assert isinstance(layer, DecoderLayer)
            assert isinstance(layer.mlp, GatedMlp)
            qkv = layer.qkv_proj(ops.rms_norm(hidden, layer.input_norm, eps))
            hidden = hidden + layer.o_proj(self._attended(qkv, batch, (kv_pool[0, index], kv_pool[1, index])))
            gate_up = layer.mlp.gate_up_proj(ops.rms_norm(hidden, layer.mlp_norm, eps))
            hidden = hidden + layer.mlp.down_proj(ops.silu_mul(gate_up))
        hidden = hidden if last_tokens is None else hidden[last_tokens]
        return ops.rms_norm(hidden, self.norm, eps)

    def _attended(self, qkv: Tensor, batch: AttentionBatch, kv: Pools) -> Tensor:
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        kernels.store_kv(k, v, *kv, batch.slot_mapping)
        q = ops.rope(q, self.cos_sin[batch.positions])
        out = torch.zeros_like(q)
        bounds = batch.query_start.tolist()
        for index, seq_len in enumerate(batch.seq_lens.tolist()):
            queries = slice(bounds[index], bounds[index + 1])
            if queries.start == queries.stop or seq_len == 0:
                continue
            blocks = batch.block_tables[index, : -(-seq_len // kv[0].shape[1])]
            keys, values = (pool[blocks].flatten(0, 1)[:seq_len] for pool in kv)
            keys = ops.rope(keys, self.cos_sin[:seq_len])
            out[queries] = ops.attention(q[queries], keys, values, config.attention_scale)
        return out.flatten(1)


def load_llama_cpp_decoder(path: Path, *, num_positions: int) -> Decoder:
    """Build the decoder of a GGUF file, its position table `num_positions` long.

    Raises DayshiftError for files that llama.cpp computes otherwise than is known here.
    """
    _check(path, load_model_config(path))
    model = load_decoder(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_positions=num_positions,
        load_format="auto",
        seed=0,
        keep_quantized=True,
        decoder_type=LlamaCppDecoder,
    )
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear):
            raise DayshiftError(f"{path}: arithmetic llama.cpp needs quantised matrices; {name} has others")
        if isinstance(layer, QuantizedLinear):
            model.set_submodule(name, BlockLinear(layer))
    return model


def _check(path: Path, config: ModelConfig) -> None:
    is_plain = config.rope_scaling is None and config.moe is None and config.head_dim % 32 == 0
    if not is_gguf(path) or config.model_type != "llama" or not is_plain:
        raise DayshiftError(
            f"{path}: arithmetic llama.cpp needs a GGUF file of architecture llama without experts and rope "
            "scaling, with heads of a multiple of 32"
        )
