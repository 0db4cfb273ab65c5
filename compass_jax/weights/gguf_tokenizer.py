"""The tokenizer files of a Hugging Face folder, from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from compass_jax.base.aliases import Json, JsonObject, Tree
from compass_jax.base.token_ids import GENERATION
from compass_jax.config.ranges import describe_value
from compass_jax.model.families.raw import REQUIRED, Raw, UnsupportedModel, WeightsError

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
_ENDS = ("eos", "eot", "eom")
# Keys after tokenizer.ggml that are read here, those of other ids aside, and the values with which
# other keys change nothing. All others are refused.
_READ = {"model", "pre", "tokens", "scores", "merges", "token_type", "add_bos_token"}
_READ |= {"add_space_prefix", "token_type_count"}
_NEUTRAL: Mapping[str, Json] = {
    "add_eos_token": False,
    "add_sep_token": False,
    "remove_extra_whitespaces": False,
}
_ID = "_token_id"


def tokenizer_files(metadata: JsonObject, where: str) -> JsonObject:
    """Returns file name -> content (JSON) of tokenizer.json, tokenizer_config.json with the chat
    template, and generation_config.json with every end token.

    Raises UnsupportedModel for a tokenizer of another kind or with unknown words, and WeightsError
    for metadata that contradict each other.
    """
    _check_keys(metadata, where)
    tokens, kind = _list(metadata, "tokens", str, where), metadata.get("tokenizer.ggml.model")
    if len({*tokens}) < len(tokens):
        raise WeightsError(f"{where}: a token of tokenizer.ggml.tokens is in the list twice")
    if kind in ("gpt2", "llama"):
        build = _byte_level if kind == "gpt2" else _sentencepiece
        try:
            tokenizer = build(metadata, tokens, where)
        except WeightsError:
            raise
        except Exception as error:  # the library has no class of its own
            raise WeightsError(
                f"{where}: the tokens and merges of its tokenizer do not fit: {str(error)[:200]}"
            ) from error
    else:
        raise UnsupportedModel(
            f"{where}: tokenizer.ggml.model = {str(kind)[:80]!r} is not supported (supported: gpt2,"
            " llama); convert the model's Hugging Face folder instead"
        )
    _add_tokens(tokenizer, metadata, tokens, where)
    special = _special_tokens(metadata, tokens, where)
    add_bos = Raw(metadata, where).flag("tokenizer.ggml.add_bos_token", kind == "llama")
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
    if template := Raw(metadata, where).typed("tokenizer.chat_template", (str,), ""):
        config["chat_template"] = template
    files: JsonObject = {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": config,
    }
    end_ids = (_token_id(metadata, name, len(tokens), where) for name in _ENDS)
    if ends := list(dict.fromkeys(x for x in end_ids if x is not None)):
        files[GENERATION] = {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    return files


def _check_keys(metadata: JsonObject, where: str) -> None:
    """Raises UnsupportedModel for keys of the tokenizer that are not read."""
    unread = []
    for key, value in metadata.items():
        name = key.removeprefix("tokenizer.ggml.")
        known = name in _READ or name.endswith(_ID) or _NEUTRAL.get(name) is value
        if name != key and not known:
            unread.append(f"{key[:80]} = {describe_value(value)}")
    if unread:
        raise UnsupportedModel(
            f"{where}: {', '.join(unread[:20])}: not supported, and may change a text's tokens;"
            " convert the model's Hugging Face folder instead"
        )


def _list(metadata: JsonObject, name: str, kind: type, where: str) -> list:
    """Returns a list of the metadata whose values are all of `kind`."""
    values = Raw(metadata, where).typed(f"tokenizer.ggml.{name}", (list,), REQUIRED)
    if not all(type(x) is kind for x in values):
        raise WeightsError(f"{where}: tokenizer.ggml.{name} is not a list of {kind.__name__} alone")
    return values


def _token_id(metadata: JsonObject, name: str, tokens: int, where: str) -> int | None:
    """Returns the id of a special token, None if there is none."""
    key = f"tokenizer.ggml.{name}{_ID}"
    if key not in metadata:
        return None
    number = Raw(metadata, where).integer(key)
    if not 0 <= number < tokens:
        raise WeightsError(f"{where}: {key} = {number}, but the tokenizer has {tokens} tokens")
    return number


def _special_tokens(metadata: JsonObject, tokens: Sequence[str], where: str) -> dict[str, str]:
    ids = {x: _token_id(metadata, field, len(tokens), where) for x, field in _SPECIAL.items()}
    return {f"{name}_token": tokens[number] for name, number in ids.items() if number is not None}


def _byte_level(metadata: JsonObject, tokens: Sequence[str], where: str) -> Tokenizer:
    """Returns a byte-level BPE tokenizer (GPT-2's kind)."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise UnsupportedModel(
            f"{where}: tokenizer.ggml.pre = {str(name)[:80]!r}: the pattern of its words is not"
            f" known (known: {', '.join(SPLITS)}); convert the model's Hugging Face folder instead"
        )
    split = SPLITS[name]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str, where)]
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


def _sentencepiece(metadata: JsonObject, tokens: Sequence[str], where: str) -> Tokenizer:
    """Returns a BPE tokenizer of SentencePiece's kind, whose merges follow the tokens' scores."""
    scores = _list(metadata, "scores", float, where)
    if len(scores) != len(tokens):
        raise WeightsError(f"{where}: tokenizer.ggml.scores must have a score for each token")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown_id = _token_id(metadata, "unknown", len(tokens), where)
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
    if Raw(metadata, where).flag("tokenizer.ggml.add_space_prefix", True):
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


def _add_tokens(
    tokenizer: Tokenizer, metadata: JsonObject, tokens: Sequence[str], where: str
) -> None:
    """Adds the tokens that are matched whole in a text: control tokens, which are special, and
    those that the model's author defined.
    """
    types = metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise WeightsError(f"{where}: tokenizer.ggml.token_type must have a type for each token")
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
