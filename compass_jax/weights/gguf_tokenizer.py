"""The tokenizer files of a Hugging Face folder, from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from compass_jax.aliases import JsonMapping, JsonObject, Tree
from compass_jax.families.raw import UnsupportedModel, WeightsError
from compass_jax.token_ids import GENERATION

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2, _LLAMA3 = _WORDS + r"\p{N}" + _OTHER, _WORDS + r"\p{N}{1,3}" + _OTHER
# tokenizer.ggml.pre -> the pattern of its words; "" is GPT-2's, "digits" GPT-2's with every digit a
# separate word
SPLITS: Mapping[str, str] = {
    "default": "",
    "gpt-2": "",
    "smollm": "digits",
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_files(metadata: JsonMapping, where: str) -> JsonObject:
    """Returns file name -> content (JSON) of tokenizer.json, tokenizer_config.json with the chat
    template, and generation_config.json with every end token.

    Raises UnsupportedModel for a tokenizer of another kind or with unknown words, and WeightsError
    for metadata that contradict each other.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, where)
    else:
        raise UnsupportedModel(
            f"{where}: tokenizer.ggml.model = {str(kind)[:80]!r} is not supported (supported: gpt2,"
            " llama); convert the model's Hugging Face folder instead"
        )
    _add_tokens(tokenizer, metadata, tokens)
    special = _special_tokens(metadata, tokens, where)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    if add_bos and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, tokens.index(bos))],
        )
    config: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    files: JsonObject = {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": config,
    }
    ends = [int(metadata[f"tokenizer.ggml.{name}"]) for name in _ENDS if _has(metadata, name)]
    if ends:
        ends = list(dict.fromkeys(ends))
        files[GENERATION] = {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    return files


def _has(metadata: JsonMapping, name: str) -> bool:
    return f"tokenizer.ggml.{name}" in metadata


def _special_tokens(metadata: JsonMapping, tokens: Sequence[str], where: str) -> dict[str, str]:
    special = {}
    for name, field in _SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{field}_token_id")
        if number is None:
            continue
        if not 0 <= number < len(tokens):
            raise WeightsError(
                f"{where}: tokenizer.ggml.{field}_token_id = {number}, but the tokenizer has"
                f" {len(tokens)} tokens"
            )
        special[f"{name}_token"] = tokens[number]
    return special


def _byte_level(metadata: JsonMapping, where: str) -> Tokenizer:
    """Returns a byte-level BPE tokenizer (GPT-2's kind)."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise UnsupportedModel(
            f"{where}: tokenizer.ggml.pre = {str(name)[:80]!r}: the pattern of its words is not"
            f" known (known: {', '.join(SPLITS)}); convert the model's Hugging Face folder instead"
        )
    split = SPLITS[name]
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3 keeps a word whole that is in the vocabulary, whatever its merges say.
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split == _LLAMA3))
    if split in ("", "digits"):
        words: list[Tree] = [pre.Digits(individual_digits=True)] if split else []
        words += [pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        words = [pre.Split(Regex(split), behavior="isolated")]
        words += [pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre.Sequence(words) if len(words) > 1 else words[0]
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: JsonMapping, where: str) -> Tokenizer:
    """Returns a BPE tokenizer of SentencePiece's kind, whose merges follow the tokens' scores."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise WeightsError(f"{where}: tokenizer.ggml.scores must have a score for each token")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(vocab, scores),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    encoding: list[Tree] = [normalizers.Replace(" ", "▁")]
    decoding: list[Tree] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        encoding.insert(0, normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(encoding)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that form a token, ordered by its score, the highest first."""
    pairs = [
        (-scores[number], vocab[token[:at]], vocab[token[at:]], token[:at], token[at:])
        for token, number in vocab.items()
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _add_tokens(tokenizer: Tokenizer, metadata: JsonMapping, tokens: Sequence[str]) -> None:
    """Adds the tokens that are matched whole in a text: control tokens, which are special, and
    those that the model's author defined.
    """
    types = metadata.get("tokenizer.ggml.token_type") or ()
    added = {
        special: [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types)
            if kind == number
        ]
        for special, number in ((True, _CONTROL), (False, _USER_DEFINED))
    }
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])
