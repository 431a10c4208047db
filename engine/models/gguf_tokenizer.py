"""The tokenizer and the chat template in a GGUF file's metadata; byte-level BPE is put together here."""

from __future__ import annotations

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from dayshift.engine.models.gguf_file import GgufFile
from dayshift.engine.models.gguf_sentencepiece import build_sentencepiece
from dayshift.engine.tokenizer_files import TokenizerParts
from dayshift.types import DayshiftError

# How a text is cut before merges apply, by llama.cpp's name; patterns from the models' tokenizer.json.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    # o200k, of GPT-4o and gpt-oss
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_PRE_TOKENIZERS = (*PATTERNS, "gpt-2", "smollm")

# Tokens that end a reply even where the metadata does not name them (llama.cpp does the same).
_END_TOKENS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>"),
    "<end_of_turn>",
)


def read_gguf_tokenizer(file: GgufFile) -> TokenizerParts:
    """Raises DayshiftError for a kind of tokenizer that is not supported."""
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.require("tokenizer.ggml.token_type")
    match file.require("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer, begins_with_bos = _build(file, tokens, types)
        case "llama":
            tokenizer, begins_with_bos = build_sentencepiece(file, tokens, types), True
        case kind:
            raise DayshiftError(
                f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; "
                "supported: gpt2 (byte-level BPE), llama (SentencePiece's BPE)"
            )
    if file.metadata.get("tokenizer.ggml.add_bos_token", begins_with_bos):
        bos_id = file.require("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return TokenizerParts(
        tokenizer=tokenizer,
        special_tokens=_special_tokens(file, tokens),
        eos_token_ids=_eos_token_ids(file, tokens),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        template_origin=str(file.path),
    )


def _build(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether a text begins with BOS where the file does not say."""
    pre = file.require("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise DayshiftError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; "
            f"supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    # Files fill the vocabulary up to the rows of the embedding with unused tokens.
    vocab = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != TokenType.UNUSED
    }
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    # Llama 3 and o200k take a word that is a token whole, even where no merges lead to it.
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in ("llama-bpe", "gpt-4o")))
    if PATTERNS.get(pre) == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for kind, is_special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        added = [token for token, its in zip(tokens, types, strict=True) if its == kind]
        tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in added])
    return tokenizer, pre == "llama-bpe"


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in PATTERNS:
        cut = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([cut, to_bytes])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's pattern
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _eos_token_ids(file: GgufFile, tokens: list[str]) -> frozenset[int]:
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    types: list[int] = file.require("tokenizer.ggml.token_type")
    usual = [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token in _END_TOKENS and kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    return frozenset(token_id for token_id in (*named, *usual) if token_id is not None)
