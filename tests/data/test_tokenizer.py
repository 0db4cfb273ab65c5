import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_folders import INST, KINDS, LINES, write_sentencepiece

from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError

TEXTS = [
    "State the final answer to the following arithmetic problem: 12 + 5 =",
    "12 + 5 = 17\n<answer>17</answer>",
    "na\u00efve caf\u00e9 \u4e2d\u6587",
] * 20
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "12 + 5 ="},
    {"role": "assistant", "content": "17"},
    {"role": "user", "content": "twice \u00e9"},
    {"role": "assistant", "content": "\n34"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 310, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def test_special_ids_and_single_digits(tokenizer):
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 2)
    assert tokenizer.vocab_size == 310
    digits = tokenizer.encode("2025")
    assert len(digits) == 4 and [tokenizer.decode([i]) for i in digits] == list("2025")
    assert len(tokenizer.encode(" answer")) < len(" answer"), "frequent words are merged"


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_survives(tokenizer, text):
    if "<|" not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 400), max_size=12))
def test_decode_never_raises(tokenizer, ids):
    known = [i for i in ids if 0 <= i < tokenizer.vocab_size]
    assert tokenizer.decode(ids) == tokenizer.decode(known)
    assert "<|im_end|>" not in tokenizer.decode(ids)


def test_transformers_reads_the_folder_alike(folder, tokenizer):
    from transformers import AutoTokenizer

    hf_tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS[:3], "a<|im_end|>\n\n 007  x", "\U0001f600"]:
        ids = tokenizer.encode(text)
        assert hf_tokenizer.encode(text) == ids
        assert hf_tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert (hf_tokenizer.eos_token_id, hf_tokenizer.pad_token_id, len(hf_tokenizer)) == (
        tokenizer.eos_id,
        tokenizer.pad_id,
        tokenizer.vocab_size,
    )
    for add in (False, True):
        messages = CHAT[:-1] if add else CHAT
        assert hf_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add
        ) == tokenizer.render(messages, add_generation_prompt=add)
        ids = hf_tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=add, return_dict=False
        )
        assert list(ids) == tokenizer.encode_chat(messages, add)


def test_what_transformers_saves_of_a_tokenizer_without_a_limit_is_read(folder, tmp_path):
    from transformers import PreTrainedTokenizerFast

    saved = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>"
    )
    saved.save_pretrained(tmp_path)
    max_length = json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"]
    assert max_length == int(1e30)
    assert Tokenizer.load(tmp_path).encode("4 + 7") == saved.encode("4 + 7")


def test_template_environment_is_transformers_own(tmp_path, folder):
    """The template in this test depends on block trimming, loop controls, tojson and special
    tokens.
    """
    from transformers import AutoTokenizer

    template = (
        "{% for m in messages %}\n    {% if m.role == 'system' %}\n{% continue %}\n    {% endif"
        " %}\n<{{ m.role }}> {{ m | tojson }}{{ eos_token }}\n{% endfor %}\n{% if"
        " add_generation_prompt %}\n<assistant>{% endif %}"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "chat_template.jinja").write_text(template)
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer.load(tmp_path).render(CHAT) == expected
    assert "Be brief" not in expected and "<|im_end|>" in expected


def test_example_mask_is_content_and_end_token(tokenizer):
    tokens, mask = tokenizer.encode_example(CHAT)
    spans, inside = [], False
    for token, learnt in zip(tokens.tolist(), mask.tolist()):
        if learnt and not inside:
            spans.append([])
        if learnt:
            spans[-1].append(token)
        inside = learnt
    assert [tokenizer.decode(span) for span in spans] == ["17", "\n34"]
    assert all(span.count(tokenizer.eos_id) == 1 and span[-1] == tokenizer.eos_id for span in spans)
    assert mask[-1], "nothing follows the last end token"
    assert (
        tokenizer.render(CHAT, add_generation_prompt=False)
        == "".join(tokenizer._backend.decode(tokens.tolist(), skip_special_tokens=False)) + "\n"
    )
    prompt = tokenizer.encode_chat(CHAT[:2], add_generation_prompt=True)
    assert (
        tokens[: len(prompt)].tolist() == prompt
        and not mask[: len(prompt)].any()
        and mask[len(prompt)]
    )


@pytest.mark.parametrize("template", [INST, LINES])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_tokens_of_the_rendered_conversation(tmp_path, kind, template):
    """SentencePiece's vocabularies put a space before a text's first word, not before an answer."""
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path, kind, template))
    chat = [
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": "answer is 7"},
        {"role": "user", "content": "is </s> text?"},
        {"role": "assistant", "content": "the answer </s> \N{GRINNING FACE}"},
    ]
    (example,) = tokenizer.encode_turns(chat)
    assert example[0].tolist() == tokenizer.encode_chat(chat, add_generation_prompt=False)
    assert example[0][example[1]].tolist().count(tokenizer.eos_id) == 2
    prompt = tokenizer.encode_chat(chat[:1])
    assert example[0][: len(prompt)].tolist() == prompt and example[1][len(prompt)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_whose_first_token_would_span_the_prompt_follows_the_prompt(tmp_path, kind):
    """The prompt ends with a space, which would be a part of "▁answer"."""
    template = LINES.replace(":\n", ": ")
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path, kind, template))
    asked, answer = {"role": "user", "content": "7"}, {"role": "assistant", "content": "answer"}
    tokens, mask = tokenizer.encode_example([asked, answer])
    prompt = tokenizer.encode_chat([asked])
    assert tokens[~mask].tolist() == prompt
    token = tokenizer._backend.token_to_id
    assert tokens[mask].tolist() == [token("answer"), token("</s>")]


def test_example_refusals_name_the_message(tmp_path, folder):
    def with_template(template):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_text((folder / name).read_text())
        (tmp_path / "chat_template.jinja").write_text(template)
        return Tokenizer.load(tmp_path)

    drops_history = with_template(
        "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last or m.role != 'assistant'"
        " else '...' }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    with pytest.raises(TokenizerError, match=r"messages\[4\].*differently"):
        drops_history.encode_example(CHAT)
    foreign = with_template(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_start|>{% endfor %}{% if"
        " add_generation_prompt %}assistant:{% endif %}"
    )
    with pytest.raises(TokenizerError, match=r"messages\[2\].*end token '<\|im_end\|>'"):
        foreign.encode_example(CHAT)
    refusing = with_template("{{ raise_exception('no system role here') }}")
    with pytest.raises(TokenizerError, match="no system role here"):
        refusing.encode_chat(CHAT, True)
    unsafe = with_template("{{ messages.append(1) }}")
    with pytest.raises(TokenizerError, match="refuses"):
        unsafe.encode_chat(CHAT, True)
    with pytest.raises(TokenizerError, match="nothing to learn"):
        Tokenizer.load(folder).encode_example(CHAT[:2])


def test_folder_errors_say_what_is_wrong(tmp_path, folder):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}})
    )
    plain = Tokenizer.load(tmp_path)
    assert plain.eos_id == plain.pad_id == 2
    with pytest.raises(TokenizerError, match="no chat template"):
        plain.encode_chat(CHAT, True)
