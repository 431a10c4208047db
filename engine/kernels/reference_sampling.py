"""Torch twins of the choice of a token: run on the CPU, and specify the kernels of `sampling.py`."""

from __future__ import annotations

import torch


def draw_by_race(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row from softmax(logits / temperature): the largest logit + temperature * g.

    g is Gumbel noise, -log of an exponential number, which makes the largest a draw from the softmax
    (Maddison et al., arXiv:1411.0030). Each token has its own, from word `token % 4` of Philox4x32-10
    (Salmon et al., doi 10.1145/2063384.2063405) of the row's key at counter `token // 4`: a draw depends
    on its row alone, whatever the batch and the device, but for rounding. Everything is float32, and a
    word has 32 bits: a probability above 1e-8 is off by less than 1e-4 of itself.

    Args:
        logits: (num_rows, vocab_size); -inf is never drawn unless all are.
        temperatures: (num_rows,) float32, finite; 0 takes the largest logit, of equals the first.
        keys: (num_rows,) int64, never the same for two draws.

    Returns:
        (num_rows,) int64.
    """
    num_counters = -(-logits.shape[1] // 4)
    words = _philox(keys, torch.arange(num_counters, device=keys.device)).flatten(1)[:, : logits.shape[1]]
    uniform = (words.float() + 0.5) * 2.0**-32
    # The early arrivals decide: there log1p has the digits that the logarithm of 1 - u has lost.
    gumbel = -(-torch.log1p(-uniform.clamp(max=0.99999994))).log()
    noise = torch.where(temperatures.unsqueeze(1) > 0, temperatures.unsqueeze(1) * gumbel, 0.0)
    return (logits.float() + noise).argmax(-1)


def largest(logits: torch.Tensor) -> torch.Tensor:
    """The token with the largest logit of each row, of equals the first: (num_rows, vocab_size) -> int64
    (num_rows,). Where logits are not numbers, some token."""
    return logits.argmax(-1)


def _philox(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10: int64 (num_keys,) and (num_counters,) -> (num_keys, num_counters, 4) in [0, 2**32)."""
    low = 0xFFFFFFFF
    key0, key1 = (keys & low).unsqueeze(1), (keys >> 32 & low).unsqueeze(1)
    c0 = counters.expand(len(keys), -1)
    c1 = c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        product0, product2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0 = (product2 >> 32 & low) ^ c1 ^ key0
        c2 = (product0 >> 32 & low) ^ c3 ^ key1
        c1, c3 = product2 & low, product0 & low
        key0, key1 = key0 + 0x9E3779B9 & low, key1 + 0xBB67AE85 & low
    return torch.stack((c0, c1, c2, c3), dim=-1)
