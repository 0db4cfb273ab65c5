"""Tokenizer folders with the chat templates of tests/chat_templates. They share one vocabulary, in
which ids 0, 1 and 2 are the padding, begin and end tokens, so that one compiled model serves all of
them."""

import json
from pathlib import Path
from typing import NamedTuple

from tiny_run import TOKENIZER

TEMPLATES = Path(__file__).parent / "chat_templates"
KNOWN = 338  # size of the vocabulary without added tokens
CONTROL = 22  # number of added tokens
VOCAB = KNOWN + CONTROL
END = 2  # the id of the token that ends a text


class Family(NamedTuple):
    """The tokens of a family's published tokenizer that its chat template uses."""

    template: str
    end: str
    begin: str = "<s>"
    control: tuple[str, ...] = ()  # special tokens
    ends: tuple[str, ...] = ()  # more end tokens, in generation_config.json
    plain: tuple[str, ...] = ()  # added tokens that are not special
    tools: bool = True  # whether the template renders tools


_CHATML = ("<|im_start|>",)
_CALLS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
_DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁call▁begin",
        "tool▁sep",
        "tool▁call▁end",
        "tool▁calls▁end",
        "tool▁outputs▁begin",
        "tool▁output▁begin",
        "tool▁output▁end",
        "tool▁outputs▁end",
    )
)
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>")
_MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
FAMILIES = {
    "qwen2_5": Family("qwen2_5", "<|im_end|>", control=_CHATML, plain=_CALLS[2:4]),
    "qwen3": Family("qwen3", "<|im_end|>", control=_CHATML, plain=_CALLS),
    "qwen3_2507": Family("qwen3_2507", "<|im_end|>", control=_CHATML, plain=_CALLS),
    "qwen3_2507_thinking": Family(
        "qwen3_2507_thinking", "<|im_end|>", control=_CHATML, plain=_CALLS
    ),
    "llama3_1": Family(
        "llama3_1",
        "<|eot_id|>",
        "<|begin_of_text|>",
        _LLAMA,
        ends=("<|eom_id|>", "<|end_of_text|>"),
    ),
    "mistral": Family("mistral", "</s>", control=(*_MISTRAL, *_RESULTS)),
    "gpt_oss": Family("gpt_oss", "<|return|>", control=_HARMONY, ends=("<|call|>",)),
    "glm_4_5": Family(
        "glm_4_5",
        "<|endoftext|>",
        control=_GLM,
        ends=("<|user|>", "<|observation|>"),
        plain=(*_CALLS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v3": Family(
        "deepseek_v3", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", _DEEPSEEK, tools=False
    ),
    "deepseek_r1": Family(
        "deepseek_r1",
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        _DEEPSEEK,
        plain=("<think>", "</think>"),
        tools=False,
    ),
}


def write_folder(folder: Path, name: str) -> str:
    """Writes the tokenizer folder of a family; returns its path."""
    family = FAMILIES[name]
    raw = json.loads((Path(TOKENIZER) / "tokenizer.json").read_text())
    first = ["<|pad|>", family.begin, family.end]
    special = [*first, *family.control]
    plain_tokens = [*family.plain]
    plain_tokens += [
        f"<|unused_{n}|>" for n in range(CONTROL - len(family.control) - len(plain_tokens))
    ]
    vocabulary = sorted(raw["model"]["vocab"].items(), key=lambda item: item[1])
    raw["model"]["vocab"] = {
        first[index] if index < len(first) else token: index for token, index in vocabulary
    }
    ids = [*range(3), *range(KNOWN, VOCAB)]
    raw["added_tokens"] = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in special,
        }
        for index, token in zip(ids, [*special, *plain_tokens], strict=True)
    ]
    ends = [index for index, token in zip(ids, special) if token in (family.end, *family.ends)]
    files = {
        "tokenizer.json": json.dumps(raw),
        "tokenizer_config.json": json.dumps(
            {"pad_token": first[0], "bos_token": family.begin, "eos_token": family.end}
        ),
        "generation_config.json": json.dumps({"eos_token_id": ends}),
        "chat_template.jinja": (TEMPLATES / f"{family.template}.jinja").read_text(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    return str(folder)
