"""Tokenizer folders as those that published SentencePiece models were converted to."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ("▁the", "▁answer", "▁is", "answer", "▁▁", "[/INST]", "▁[/INST]")
LETTERS = "▁abcdefghijklmnopqrstuvwxyzINST[/]0123456789.:"
# the chat template of Llama 2 and Mistral 7B, without a system message
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
# a template in which a line break precedes an answer
LINES = (
    "{% for m in messages %}{{ m.role + ':\n' + m.content }}"
    "{{ '</s>' if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
_STRIPPED = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
# how a text's first word gets its space -> normaliser, pre-tokeniser, decoder
KINDS = {
    "prepend": (  # Llama 2, Mistral 7B v0.1
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        decoders.Sequence(_STRIPPED),
    ),
    "first": (  # Mistral 7B v0.3
        None,
        pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False),
        decoders.Sequence(_STRIPPED),
    ),
    "always": (  # T5's kind
        None,
        pre_tokenizers.Metaspace("▁", prepend_scheme="always"),
        decoders.Metaspace("▁", prepend_scheme="always"),
    ),
    "never": (  # Gemma
        normalizers.Replace(" ", "▁"),
        None,
        decoders.Sequence(_STRIPPED[:3]),
    ),
}


def write_sentencepiece(folder, kind, template=INST):
    """Writes a folder with a BPE tokenizer with byte tokens, of one of KINDS; returns the path."""
    pieces = [*LETTERS, *(word[:end] for word in WORDS for end in range(2, len(word) + 1))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    tokens = list(dict.fromkeys(tokens))
    merges = [(piece[:-1], piece[-1]) for piece in dict.fromkeys(pieces) if len(piece) > 1]
    backend = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    normalizer, pre_tokenizer, decoder = KINDS[kind]
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(x, normalized=False) for x in tokens[:3]])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": template}), encoding="utf-8"
    )
    return folder
