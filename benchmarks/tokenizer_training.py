"""Training of a small tokenizer, written as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from compass_jax.data.tokenizer import Tokenizer

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Tokenizer:
    """Trains a byte-level BPE on `texts`, writes it to `folder` in Hugging Face format with a
    ChatML template, and loads it.

    Each digit is one token, so numbers of any length are encoded alike, and any text can be
    encoded. Ids 0, 1, 2 are `<|endoftext|>` (pad), `<|im_start|>` and `<|im_end|>` (end of turn).
    The vocabulary has at most `vocab_size` entries (fewer if the texts have fewer pairs to merge)
    and at least the 3 special tokens and 256 bytes.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [PAD, TURN_START, TURN_END]
    backend = Backend(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, text])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": TURN_END,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHATML)
    return Tokenizer.load(folder)
