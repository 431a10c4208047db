"""SentencePiece's BPE in a GGUF file's metadata (`tokenizer.ggml.model` "llama"): Llama 2, Mistral, Gemma.

SentencePiece joins the two neighbours whose union is the token with the highest score. `tokenizers`
wants pairs in the order in which they are joined: all pairs that are tokens and whose union is one, by
the union's score.
"""

from __future__ import annotations

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from dayshift.engine.models.gguf_file import GgufFile
from dayshift.types import DayshiftError

_SPACE = "▁"


def build_sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """The tokenizer, without what stands around a plain text. Raises DayshiftError for damaged metadata."""
    scores: list[float] = file.require("tokenizer.ggml.scores")
    if not len(scores) == len(types) == len(tokens):
        raise DayshiftError(
            f"{file.path}: {len(tokens)} tokens have {len(scores)} scores and {len(types)} types"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN]
    tokenizer = Tokenizer(
        BPE(
            vocab,
            _merges(tokens, types, scores),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=any(kind == TokenType.BYTE for kind in types),
        )
    )
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    for kind, is_special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        added = [token for token, its in zip(tokens, types, strict=True) if its == kind]
        tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in added])
    return tokenizer


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Only plain tokens are joined, and come of it."""
    score_of = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind == TokenType.NORMAL
    }
    best_first = sorted(score_of, key=score_of.__getitem__, reverse=True)
    return [
        (token[:place], token[place:])
        for token in best_first
        for place in range(1, len(token))
        if token[:place] in score_of and token[place:] in score_of
    ]
