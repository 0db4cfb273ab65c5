"""The instructions of IFEval, each with texts that follow it and texts that do not."""

import time

import pytest

from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.verifiers.kinds.instructions import CONSTRAINTS, judge

# Each row: name, arguments, texts that follow the instruction, texts that do not.
TABLE = [
    ("keywords:existence", {"keywords": ["sun", "sea"]}, ["The SUN. A sea", "sunny sea"], ["sun"]),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "at least"},
        ["go, Go!", "go going"],
        ["go", ""],
    ),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "less than"},
        ["go on", "x"],
        ["go gone"],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, ["badly"], ["too BAD."]),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        ["Quick q"],
        ["q"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "exactly"},
        ["One. Two!", "Pi is 3.14. So", 'He said "go." Then', "Mr. A. Bo went. He did."],
        ["One", "1. 2. 3.", "At 5 p.m. on Dec. 3"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na *** b\n***"],
        ["a\n\nb", "a *** *** b", "a"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        ["well-known", "it's"],
        ["one two three", "it's well"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        ['a\n\n"Then, b'],
        ["a\n\nb then", "then", "a\n\nthen\n\nc"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b c]"], ["[a [b]"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\nP.S. more", "bye\np. s. x", "Bye P.S.", "Bye\nP.S."],
        ["PS: y", "Bye"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n- b"],
        ["* a", "** a\n* b"],
    ),
    ("detectable_format:constrained_response", {}, ["Well: My answer is no."], ["no"]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and **b**"],
        ["*a*", "* * * *"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "PART", "num_sections": 2},
        ["PART 1 x PART 2", "PART1PART 2"],
        ["PART 1 PART", "PARTS 1 PARTS 2", "Part 1 Part 2"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', "```json\n[1]\n```"], ["a: 1", "[1] x"]),
    ("detectable_format:title", {}, ["<<A song>>\nla"], ["<< >>", "<A>"]),
    ("combination:two_responses", {}, ["a ****** b"], ["a", "a ****** a", "a ****** b ****** c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, ["say it. It"], ["It. Say it."]),
    ("startend:end_checker", {"end_phrase": "The end."}, ['"x the end."'], ["The end. x"]),
    ("startend:quotation", {}, ['"a"', ' "a b" '], ['"', "a", '"a" b']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at most"},
        ["A NASA man"],
        ["A B C"],
    ),
    ("punctuation:no_comma", {}, ["a; b", "a\uff0cb"], ["a, b"]),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), TABLE)
def test_an_instruction(name, arguments, good, bad):
    for text in good:
        assert judge(text, [name], [arguments])["reward"] == 1, text
    for text in bad:
        assert judge(text, [name], [arguments])["reward"] == 0, text


BY_LANGUAGE = {
    "language:response_language",
    "change_case:english_capital",
    "change_case:english_lowercase",
}


def test_the_table_has_every_instruction_but_those_that_need_langdetect():
    assert {row[0] for row in TABLE} == set(CONSTRAINTS) - BY_LANGUAGE


def test_the_language_of_a_response():
    pytest.importorskip("langdetect")
    row = (["language:response_language"], [{"language": "de"}])
    assert judge("Das ist ein ganz gewöhnlicher Satz über das Wetter.", *row)["reward"] == 1
    assert judge("This is a quite ordinary sentence about it.", *row)["reward"] == 0
    assert judge("123", *row)["reward"] == 1  # as Google's checker does if it detects no language


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("english_capital", "THIS IS A QUITE ORDINARY SENTENCE.", "DAS IST EIN GANZ GEWÖHNLICHER"),
        ("english_lowercase", "this is a quite ordinary sentence.", "This is ordinary."),
    ],
)
def test_a_case_is_of_english(name, good, bad):
    pytest.importorskip("langdetect")
    for text, score in ((good, 1), (bad, 0)):
        assert judge(text, [f"change_case:{name}"], [{}])["reward"] == score


@pytest.mark.parametrize(
    ("text", "name", "arguments", "strict", "loose"),
    [
        ("Sure:\n*a*", "startend:quotation", {}, 0, 0),
        ('Sure:\n"a"', "startend:quotation", {}, 0, 1),
        ("*end*\nBye", "startend:end_checker", {"end_phrase": "end"}, 0, 1),
        ('**"a"**', "startend:quotation", {}, 0, 1),
        ("Sure, yes\nno comma\nWell, bye", "punctuation:no_comma", {}, 0, 1),
        ("one, two\nno comma", "punctuation:no_comma", {}, 0, 1),
        ("a, b", "punctuation:no_comma", {}, 0, 0),
        ("a b", "punctuation:no_comma", {}, 1, 1),
    ],
)
def test_the_loose_score_leaves_out_first_and_last_lines_and_asterisks(
    text, name, arguments, strict, loose
):
    verdict = judge(text, [name], [arguments])
    assert (verdict["reward"], verdict["loose"]) == (strict, loose)


def test_thoughts_are_no_part_of_the_response():
    assert judge("<think>a, b</think>c", ["punctuation:no_comma"], [{}])["reward"] == 1
    assert judge("a, b</think>c", ["punctuation:no_comma"], [{}])["reward"] == 1


@pytest.mark.parametrize("name", sorted(set(CONSTRAINTS) - BY_LANGUAGE))
def test_a_long_text_is_read_in_time(name):
    arguments = next(row[1] for row in TABLE if row[0] == name)
    start = time.process_time()
    for text in ("<<" * 50_000, "*" * 100_000, "[" * 100_000, '."' * 50_000, " \n" * 50_000 + "a"):
        judge(text, [name], [arguments])
    assert time.process_time() - start < 10


def test_all_or_a_share():
    row = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{"num_words": None}, None],
    }
    verifier = build(Check("instructions"), "answer")
    assert verifier(row, "One thing")[:2] == (0.0, {"followed": 0.5, "loose": 0.0})
    assert verifier(row | {"credit": "share"}, "One thing")[:2] == (
        0.5,
        {"followed": 0.5, "loose": 0.0},
    )
    assert verifier(row, "  ")[:2] == (0.0, {"followed": 0.0, "loose": 0.0})


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["keywords:exist"], [{}], "no instruction 'keywords:exist'; there are keywords:existence"),
        (["punctuation:no_comma"], [{"n": 1}], "no_comma.*unexpected keyword"),
        (["punctuation:no_comma"], [], "1 instructions and 0 kwargs"),
        ([], [], "0 instructions"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 1, "relation": "around"}],
            "relation 'around': it must be one of at least",
        ),
    ],
)
def test_a_row_that_nobody_can_judge_is_an_error_and_no_zero(names, arguments, message):
    with pytest.raises(ValueError, match=message):
        judge("text", names, arguments)
