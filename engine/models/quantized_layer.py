"""A decoder layer whose attention hands its output to a quantised projection, for few single queries."""

from __future__ import annotations

from torch import Tensor, nn

from dayshift.engine import kernels
from dayshift.engine.kernels.quantized import products
from dayshift.engine.kernels.token_attention import attend_to_points, can_attend
from dayshift.engine.models.decoder import AttentionBatch, Decoder, DecoderLayer, Pools
from dayshift.engine.models.quantized import QuantizedLinear


class QuantizedLayer(nn.Module):
    """Stands in, on a GPU, for a `DecoderLayer` whose output projection is quantised.

    In a step of a few sequences with one token each, rotation, the store into the pool, attention and the
    inputs of the projection are one launch. Every other step goes through the layer as it is.
    """

    def __init__(self, layer: DecoderLayer, o_proj: QuantizedLinear) -> None:
        super().__init__()
        self.layer, self.window = layer, layer.window
        self._o_matrices, self._o_bias = o_proj.parts.matrices, o_proj.bias

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        batch: AttentionBatch,
        kv: Pools,
        cos_sin: Tensor,
        last_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        layer, config = self.layer, self.layer.config
        is_one_launch = (
            last_tokens is None
            and not kernels.is_batch_invariant()
            and can_attend(
                len(hidden), config.num_heads, config.head_dim, hidden.dtype, kv[0], batch.block_tables
            )
        )
        if not is_one_launch:
            return layer(hidden, residual, batch, kv, cos_sin, last_tokens)
        qkv, residual = layer.qkv_proj.after_norm(hidden, residual, layer.input_norm, config.rms_norm_eps)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        place = (batch.slot_mapping, batch.block_tables, batch.seq_lens, cos_sin)
        points = attend_to_points(q, k, v, layer.heads(), *kv, *place)
        hidden = products(points, qkv, self._o_matrices, self._o_bias)
        return layer.after_attention(hidden, residual)


def attend_in_one_launch(model: Decoder) -> None:
    """Replace the layers of a model on a GPU whose output projection is quantised."""
    for index, layer in enumerate(model.layers):
        if isinstance(layer, DecoderLayer) and isinstance(layer.o_proj, QuantizedLinear):
            model.layers[index] = QuantizedLayer(layer, layer.o_proj)
