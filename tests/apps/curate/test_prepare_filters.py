"""The filters that look at one row alone: the rows that they remove, with the reasons."""

import pytest

from compass_jax.apps.curate.filters import (
    check_languages,
    other_language,
    repetition,
    switched_on,
    too_short,
    unfinished,
)
from compass_jax.apps.curate.sample import Sample
from compass_jax.config import ConfigError
from compass_jax.config.prepare import PrepareConfig


def answered(*answers, **fields):
    messages = [{"role": "user", "content": "What is it?"}]
    messages += [{"role": "assistant", "content": answer, **fields} for answer in answers]
    return Sample("rows.jsonl, line 1", messages, (), 3)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("It is 4.", ""),
        ("<think>2 + 2</think>4", ""),
        ("<think>a</think> and <think>b</think> 4", ""),
        ("<think>is <answer> a tag?</think><answer>4</answer>", ""),
        ("so \\boxed{\\frac{1}{2}} it is", ""),
        ("so \\boxed{\\left\\{1, 2\\right.}", ""),  # an escaped brace needs no partner
        ("", "the answer is empty"),
        ("  \n", "the answer is empty"),
        ("<think>2 + 2", "<think> is never closed"),
        ("<think>2 <think>+ 2</think> 4", "<think> is opened inside <think>"),
        ("<think>2 <think>+</think> 2</think> 4", "<think> is opened inside <think>"),
        ("2 + 2</think> 4", "</think> closes nothing"),
        ("<think>2</think> + </think> 4", "</think> closes nothing"),
        ("a </think> b <think> 4", "</think> closes nothing"),
        ("<think>2 + 2</think>\n ", "nothing comes after the chain of thought"),
        ("<think>2 + 2</think><answer>4", "<answer> is never closed"),
        ("it is \\boxed{\\frac{1}{2}", "\\boxed{ is never closed"),
        ("it is \\boxed{1, 2\\}", "\\boxed{ is never closed"),
        ("it is \\boxed{1 \\\\}", ""),  # a line break, then the end
    ],
)
def test_an_answer_is_whole_or_says_why_not(answer, reason):
    assert unfinished(answered(answer), "answer") == reason


def test_every_answer_counts_a_call_needs_no_text_and_a_tag_may_be_none():
    assert unfinished(answered("4", "<think>"), "answer") == "<think> is never closed"
    assert unfinished(answered("", tool_calls=[{"name": "f"}]), "answer") == ""
    assert unfinished(answered(), "answer") == "there is no answer"
    assert unfinished(answered("<answer>4"), "") == ""


def test_lengths_are_counted_without_white_space():
    sample = answered(" a \n b")
    assert too_short(sample, 11) == "" and too_short(sample, 12) == "11 characters, fewer than 12"


LINES = "\n".join(["one line here", "another line"] * 2)


@pytest.mark.parametrize(
    ("answer", "most", "reason"),
    [
        (LINES, 0.49, "50% of its lines repeat an earlier one"),
        (LINES, 0.5, ""),
        ("so it goes on and on. " * 10, 0.5, "89% of its runs of 8 words repeat an earlier one"),
        ("yes\nno\n\n\n\n", 0.1, ""),
        ("one two three four five six seven eight nine ten", 0.0, ""),
    ],
)
def test_repetition_is_a_share_of_lines_and_of_runs_of_words(answer, most, reason):
    assert repetition(answered(answer), most) == reason


def test_a_filter_that_is_switched_off_is_not_asked():
    on = {"unfinished", "too_short", "repetition"}
    assert set(switched_on(PrepareConfig(("a",)))) == on
    assert set(switched_on(PrepareConfig(("a",), languages=("en",)))) == {*on, "language"}
    off = PrepareConfig(("a",), unfinished=False, least_characters=0, most_repeated=1.0)
    assert switched_on(off) == {}


GERMAN = "Der Bäcker verkauft am Montag zwölf Brote und am Dienstag noch einmal zwölf."
ENGLISH = "The baker sells twelve loaves of bread on Monday and twelve more on Tuesday."


def test_an_answer_in_another_language_is_taken():
    pytest.importorskip("langdetect")
    check_languages(("en", "de"))
    assert other_language(answered(GERMAN), ("en",)) == "the answer is in de"
    assert other_language(answered(GERMAN), ("en", "de")) == ""
    assert other_language(answered(ENGLISH), ("en",)) == ""
    assert other_language(answered("12 + 30 = 42"), ("en",)) == ""
    with pytest.raises(
        ConfigError, match=r"prepare.languages names 'english'; langdetect knows af"
    ):
        check_languages(("english",))
