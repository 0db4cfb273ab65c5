"""Chat templates render as in transformers, and any failure of a template is one kind of error."""

import json
from pathlib import Path

import pytest
from tiny_run import TOKENIZER

from compass_jax.data.templates import TemplateFailure, render
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.weights.carried import carry_files

CHAT = [
    {"role": "user", "content": "12 + 5 = é \U0001f600"},
    {"role": "assistant", "content": "\n17"},
]
FAULTY = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ unknown.attribute }}": "'unknown' is undefined",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "ok\n{% if %}": r"line 2 of the template",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ raise_exception('no system role here') }}": "no system role here",
    "{% generation %}x": "endgeneration",
    "{{ {1: 2, 'a': 3} | tojson(sort_keys=True) }}": "TypeError",
}


@pytest.mark.parametrize("template", FAULTY)
def test_any_exception_of_a_template_is_a_refusal_in_its_words(template):
    with pytest.raises(TemplateFailure) as exc_info:
        render(template, messages=CHAT)
    assert FAULTY[template] in str(exc_info.value) and len(str(exc_info.value)) < 700


def folder_with(tmp_path, template, name="folder"):
    folder = tmp_path / name
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((Path(TOKENIZER) / file).read_text())
    (folder / "chat_template.jinja").write_text(template)
    return folder


LIKE_TRANSFORMERS = {
    "no tools": "{%- if tools is not none -%}TOOLBOX{%- endif -%}{{ messages[0].content }}",
    "no documents": "{{ documents is none }}{{ tools is none }}{{ documents is defined }}",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
    "generation that trims": (
        "{% for m in messages %}  {%- generation -%}  {{ m.content }}  {%- endgeneration -%} x\n"
        "{% endfor %}"
    ),
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m }}"
    "{% endfor %}",
    "blocks are trimmed": "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n{% endif %}\n"
    "{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, ensure_ascii=true) }}",
    "the day": "{{ strftime_now('%Y-%m-%d') }}",
    "names of tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}",
    "a namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}"
    "{% endfor %}{{ n.i }}{{ dict(a=1) }}{{ range(3) | list }}",
    "an argument": "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}",
}


@pytest.mark.parametrize("case", LIKE_TRANSFORMERS)
def test_a_template_renders_as_in_transformers(tmp_path, case):
    from transformers import AutoTokenizer

    folder = folder_with(tmp_path, LIKE_TRANSFORMERS[case])
    hf_tokenizer, tokenizer = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for arguments in ({}, {"enable_thinking": False}):
        expected = hf_tokenizer.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=True, **arguments
        )
        assert tokenizer.render(CHAT, **arguments) == expected
    assert "TOOLBOX" not in expected


def test_template_args_are_those_of_the_tokenizer_and_a_call_s_win(tmp_path):
    folder = folder_with(tmp_path, "{{ a }}{{ b }}{{ messages[0].content }}")
    tokenizer = Tokenizer.load(folder, {"a": 1, "b": "x"})
    question = [{"role": "user", "content": "?"}]
    assert tokenizer.render(question) == "1x?" == tokenizer.rendered(question, True)
    assert tokenizer.render(question, b=[2]) == "1[2]?"
    assert tokenizer.encode_prompt(question, b="y") == tokenizer.encode("1y?")
    assert tokenizer.encode_chat(question, True) == tokenizer.encode("1x?")


def test_tools_reach_the_template_as_they_are(tmp_path):
    folder = folder_with(tmp_path, "{{ tools | tojson }}{{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "add"}}]
    question = [{"role": "user", "content": "?"}]
    assert Tokenizer.load(folder).render(question, tools) == json.dumps(tools) + "?"
    assert Tokenizer.load(folder).render(question) == "null?"


@pytest.mark.parametrize("as_files", [True, False])
def test_the_template_for_tools_renders_them_as_in_transformers(tmp_path, as_files):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    templates = {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "{{ tools[0].function.name }} {{ messages[0].content }}",
        "rag": "documents",
    }
    saved = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    saved.chat_template = templates
    saved.save_pretrained(tmp_path, save_jinja_files=as_files)
    assert (tmp_path / "additional_chat_templates").exists() == as_files
    carried = tmp_path / "carried"
    carried.mkdir()
    carry_files(tmp_path, carried)
    tools = [{"type": "function", "function": {"name": "add"}}]
    question = [{"role": "user", "content": "?"}]
    for folder in (tmp_path, carried):
        tokenizer, reference = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
        for given, expected in (((), "plain ?"), (tools, "add ?")):
            assert tokenizer.render(question, given) == expected
            assert expected == reference.apply_chat_template(
                question, tools=given or None, tokenize=False, add_generation_prompt=True
            )


@pytest.mark.parametrize("names_it", [True, False])
def test_developers_are_the_system_where_the_template_does_not_name_them(tmp_path, names_it):
    shows = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}"
    template = shows + ("{# developer #}" if names_it else "")
    tokenizer = Tokenizer.load(folder_with(tmp_path, template))
    talk = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "?"}]
    role = "developer" if names_it else "system"
    assert tokenizer.render(talk) == f"{role}:Be brief. user:? "


def test_the_error_of_a_broken_template_names_its_folder(tmp_path):
    folder = folder_with(tmp_path, "{% for m in messages %}")
    with pytest.raises(TokenizerError, match=rf"^the chat template of {folder} refuses these"):
        Tokenizer.load(folder).encode_chat(CHAT, True)
