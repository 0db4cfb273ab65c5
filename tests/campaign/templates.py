"""Faults of chat templates, which are programs that somebody else wrote.

A template of `_LEGAL` is known here as a function of Python too: the prompts must have its text.
One of `_REFUSED` does what no template may, or gives no prompt at all. It must be refused by its
file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import spies
from .row_meaning import asked, backend, rendered
from .strict import damage_bytes, odd_encoding
from .words import Expected, Verdict, judge
from .world import CONFIG, ROWS, Case

SHARE = 6
CHATML = (
    Path(__file__).parents[2] / "configs" / "tiny_tokenizer" / "chat_template.jinja"
).read_text()
LOOP = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)

_LEGAL: list[tuple[str, str, Callable[[str], str]]] = [
    (
        "the same, in another spelling",
        LOOP + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        lambda t: _chatml(t),
    ),
    ("a comment", "{# " + "x" * 2000 + " #}" + CHATML, lambda t: _chatml(t)),
    (
        "plain text",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}",
        lambda t: f"user: {t}<|im_end|>",
    ),
    (
        "a default system turn",
        "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}" + CHATML,
        lambda t: "<|im_start|>system\nBe brief.<|im_end|>\n" + _chatml(t),
    ),
    (
        "upper case",
        "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}",
        lambda t: t.upper() + "<|im_end|>",
    ),
    (
        "trimmed",
        "{% for m in messages %}{{ m.content | trim }}<|im_end|>{% endfor %}",
        lambda t: t.strip() + "<|im_end|>",
    ),
    (
        "a macro",
        "{% macro say(m) %}{{ m.content }}{% endmacro %}{{ say(messages[0]) }}<|im_end|>",
        lambda t: t + "<|im_end|>",
    ),
    ("an unknown name", "{{ nothing }}" + CHATML, lambda t: _chatml(t)),
    (
        "a condition",
        "{% if tools is defined and tools %}x{% endif %}" + CHATML,
        lambda t: _chatml(t),
    ),
    (
        "its length",
        "{{ messages | length }}{{ messages[0]['content'] }}<|im_end|>",
        lambda t: f"1{t}<|im_end|>",
    ),
    (
        "a namespace",
        (
            "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor"
            " %}{{ n.i }}{{ messages[0].content }}"
        ),
        lambda t: f"1{t}",
    ),
    (
        "short loops",
        "{% for a in range(20) %}{% for b in range(20) %}{% endfor %}{% endfor %}" + CHATML,
        lambda t: _chatml(t),
    ),
    (
        "json",
        "{{ messages[0].content | tojson }}<|im_end|>",
        lambda t: json.dumps(t, ensure_ascii=False) + "<|im_end|>",
    ),
    (
        "break",
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}<|im_end|>",
        lambda t: t + "<|im_end|>",
    ),
    (
        "the end token by its name",
        "{{ messages[0].content }}{{ eos_token }}",
        lambda t: t + "<|im_end|>",
    ),
]
_REFUSED: list[tuple[str, str]] = [
    ("a range", "{{ range(10**12) | list }}"),
    ("a macro that calls itself", "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}"),
    ("classes", "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}"),
    ("globals", "{{ lipsum.__globals__['os'].popen('id').read() }}"),
    ("cycler", "{{ cycler.__init__.__globals__.os.system('true') }}"),
    ("raise_exception's globals", "{{ raise_exception.__globals__ }}"),
    (
        "attr",
        (
            "{{ '' | attr('__class__') | attr('__mro__') }}{% if not ('' | attr('__class__')) %}{{"
            " raise_exception('no') }}{% endif %}"
        ),
    ),
    ("its own refusal", "{{ raise_exception('not these') }}"),
    ("a syntax error", "{% for m in messages %}{{ m.content }}"),
    ("an unknown tag", "{% nothing %}" + CHATML),
    ("an unknown filter", "{{ messages | nothing }}"),
    ("include", "{% include '/etc/passwd' %}"),
    ("import", "{% import 'os' as os %}{{ os }}"),
    ("extends", "{% extends 'x' %}"),
    ("a division by zero", "{{ 1 // 0 }}"),
    ("an attribute of nothing", "{{ nothing.more }}"),
    ("an index beyond", "{{ messages[7]['content'] }}"),
    ("a wrong type", "{{ 'a' + 3 }}"),
    ("a call of a text", "{{ 'a'() }}"),
    ("a recursion of data", "{% set x = [] %}{% set _ = x.append(x) %}{{ x | tojson }}"),
    ("nothing at all", ""),
    ("blanks", "{% if false %}x{% endif %}"),
    ("deep brackets", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"),
    ("deep blocks", "{% if true %}" * 3000 + "x" + "{% endif %}" * 3000),
    ("ten million characters", "x" * 10_000_000),
    ("a text of its own that is too long", "{{ 'word ' * 100000 }}"),
    ("half a character", "{{ '\\ud800' }}{{ messages[0].content }}"),
]


def _chatml(text: str) -> str:
    return rendered([{"role": "user", "content": text}], True)


def run(case: Case) -> Verdict:
    """One template."""
    case.bring("rows.jsonl", "tokenizer")
    folder, rng = case.folder / "tokenizer", case.rng
    kind = rng.choice(["legal"] * 3 + ["refused"] * 7 + ["bytes", "named", "place"])
    if kind == "place":
        return _place(case, folder)
    outcomes: list[Any] = []
    if kind == "legal":
        told, text, same = rng.choice(_LEGAL)
        outcomes = [_expected(same)]
    elif kind == "refused":
        told, text = rng.choice(_REFUSED)
    elif kind == "named":
        told, text, outcomes = "the default of several by name", CHATML, [_expected(_chatml)]
    else:
        data, told = (
            damage_bytes(CHATML.encode(), rng) if rng.random() < 0.5 else odd_encoding(CHATML, rng)
        )
        return _damaged(case, folder, data, told)
    # Either in its own file or in tokenizer_config.json, where the file is missing.
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    where = "config" if kind == "named" or rng.random() < 0.4 else "file"
    raw = json.loads(config.read_text())
    if where == "file":
        file.write_text(text)
    else:
        file.unlink()
        raw["chat_template"] = (
            [{"name": "other", "template": "x"}, {"name": "default", "template": text}]
            if kind == "named"
            else text
        )
        config.write_text(json.dumps(raw))
    case.tell(f"template in the {where}: {told}; train")
    ended = case.compass(["train", CONFIG], spies.prompts)
    # What comes out of a template and cannot be encoded is told with the tokenizer's folder.
    names = ["template", "longer than", "the tokenizer tokenizer"]
    return judge(asked(ended, case), Expected(outcomes, names))


def _expected(same: Callable[[str], str]) -> list[dict[str, Any]]:
    rows = []
    for row in ROWS:
        text = same(row["prompt"])
        rows.append(
            {
                "text": text,
                "controls": sum(
                    i < 3 for i in backend().encode(text, add_special_tokens=False).ids
                ),
                "answer": row["answer"],
            }
        )
    return rows


def _damaged(case: Case, folder: Path, data: bytes, told: str) -> Verdict:
    """Random damage: what the engine of templates itself makes of it is its meaning."""
    (folder / "chat_template.jinja").write_bytes(data)
    case.tell(f"chat_template.jinja: {told}; train")
    outcomes = []
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        made = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        template = made.from_string(data.decode("utf-8-sig"))
        special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        outcomes = [
            _expected(
                lambda t: template.render(
                    messages=[{"role": "user", "content": t}], add_generation_prompt=True, **special
                )
            )
        ]
        outcomes = outcomes if all(row["text"].strip() for row in outcomes[0]) else []
    except Exception:
        outcomes = []
    ended = case.compass(["train", CONFIG], spies.prompts)
    return judge(asked(ended, case), Expected(outcomes, ["template", "longer than"]))


def _place(case: Case, folder: Path) -> Verdict:
    """The template's file is none."""
    file, kind = (
        folder / "chat_template.jinja",
        case.rng.choice(["folder", "odd value", "no template", "number beside the file"]),
    )
    config = folder / "tokenizer_config.json"
    raw, outcomes = json.loads(config.read_text()), []
    file.unlink()
    if kind == "folder":
        file.mkdir()
        outcomes = [_expected(_chatml)]  # tokenizer_config.json has the same template
    elif kind == "odd value":
        raw["chat_template"] = case.rng.choice(
            [
                3,
                {},
                {"a": 1},
                [3],
                [{"name": "default"}],
                [{"name": "default", "template": 3}],
                True,
                "",
                [None],
                ["x"],
            ]
        )
    elif kind == "no template":
        del raw["chat_template"]
    else:
        file.write_text(CHATML)
        raw["chat_template"], outcomes = 3, [_expected(_chatml)]
    config.write_text(json.dumps(raw))
    case.tell(f"chat_template: {kind}, {str(raw.get('chat_template'))[:60]}; train")
    ended = case.compass(["train", CONFIG], spies.prompts)
    return judge(asked(ended, case), Expected(outcomes, ["template", "tokenizer_config.json"]))
