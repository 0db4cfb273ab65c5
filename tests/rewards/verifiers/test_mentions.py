"""Wordings of a choice in several languages, with negations, and hostile ones."""

import time

import pytest

from compass_jax.rewards.verifiers.kinds.choice import SEVERAL, chosen

WORDINGS = [
    ("**B.** because", "B"),
    ("**B)** because it is gold", "B"),
    ("Réponse : B", "B"),
    ("Réponse : **B**", "B"),
    ("La bonne réponse est B.", "B"),
    ("Antwort: B", "B"),
    ("Die richtige Antwort ist (C).", "C"),
    ("Respuesta: B", "B"),
    ("La respuesta correcta es la B.", "B"),
    ("答案：B", "B"),
    ("答案是B。", "B"),
    ("正确答案是 **C**", "C"),
    ("答え：B", "B"),
    ("정답: B", "B"),
    ("정답은 B", "B"),
    ("Ответ: B", "B"),
    ("Правильный ответ — B.", "B"),
    ("الإجابة: B", "B"),
    ("उत्तर: B", "B"),
    ("Resposta: B", "B"),
    ("Risposta: B", "B"),
    ("La risposta è B.", "B"),
    ("The answer isn't B; it's C.", "C"),
    ("The answer is not B, it is C.", "C"),
    ("It isn't A. It's D.", "D"),
    ("It's B, not A.", "B"),
    ("The answer is B, not A.", "B"),
    ("<answer>A is wrong; B</answer>", "B"),
    ("<answer>A is wrong, B is right</answer>", "B"),
    ("<answer>not A, but B</answer>", "B"),
    ("<answer>Neither A nor B but C</answer>", "C"),
    ("<answer>B rather than A</answer>", "B"),
    ("<answer>A and B are wrong; C</answer>", "C"),
    ("<answer>A, B and D are incorrect; C</answer>", "C"),
    ("<answer>A is wrong</answer>", None),
    ("<answer>B. None of the above</answer>", "B"),
    ("<answer>B) not enough information</answer>", "B"),
    ("<answer>B (no change)</answer>", "B"),
    ("<answer>(D) No change</answer>", "D"),
    ("<answer>B: it does not react with A</answer>", "B"),
    ("<answer>A no, B sí</answer>", "B"),
    ("<answer>Nicht A, sondern B</answer>", "B"),
    ("<answer>pas A, mais B</answer>", "B"),
    ("<answer>不是A，而是B</answer>", "B"),
    ("<answer>A is not correct, so it must be B</answer>", "B"),
    ("<answer>A isn't right and B isn't either</answer>", None),
    ("The answer isn't B.", None),
    ("Vitamin C prevents scurvy.", None),
    ("I do not know", None),
    ("A cat is not a dog.", None),
    ("The answer is A, but it's not certain.", "A"),
    ("The correct option is not A. Option C is correct.", "C"),
    ("So it must be B.", "B"),
    ("**Answer:** B", "B"),
    ("**Answer: B** because", "B"),
    ("### Réponse finale\n**B**", "B"),
    ("Solution: C", "C"),
    ("Choice: (A)", "A"),
    ("Options:\nA. iron\nB. gold\nRéponse : B", "B"),
    ("A. iron\nB. gold", None),
    ("My choice = D", "D"),
    ("Both A and B are wrong. It's C.", "C"),
]


@pytest.mark.parametrize(("response", "letter"), WORDINGS)
def test_a_wording_chooses_what_it_asserts(response, letter):
    assert chosen(response, "answer") == letter


@pytest.mark.parametrize(
    "response",
    [
        "<answer>A is wrong; B or C</answer>",
        "It's A. It's not C, it's B.\nIt's A, it's B.",
        "<answer>not A, B, C</answer>",
    ],
)
def test_several_asserted_letters_are_no_choice(response):
    assert chosen(response, "answer") == SEVERAL


@pytest.mark.parametrize("unit", ["A is not B, ", "(A)", "A and ", "is B\n", "not ", "B: ", "—"])
def test_a_long_wording_takes_linear_time(unit):
    start = time.process_time()
    text = unit * (200_000 // len(unit))
    for response in (text, f"<answer>{text}</answer>", f"{text}X not"):
        chosen(response, "answer")
    assert time.process_time() - start < 3
