"""Evaluation questions are found in training rows by runs of words and as a whole."""

import json

from compass_jax.curate.contamination import OF_TEMPLATE, Contamination
from compass_jax.curate.sample import Sample

LONG = "a train leaves the old station at noon and travels sixty miles an hour to the far coast"


def sample(asked, answer="yes"):
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return Sample("x", messages, (), 3)


def against(tmp_path, *questions, length=13):
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps({"prompt": q, "answer": "4"}) + "\n" for q in questions))
    return Contamination([str(path)], length, lambda line: None)


def test_a_run_of_words_is_enough_and_one_less_is_not(tmp_path):
    found = against(tmp_path, "What is 2 + 2?", LONG)
    said = LONG.split()
    hit = found.hit(sample("Tell me: " + " ".join(said[2:15]).upper() + "."))
    assert hit is not None and (hit.question, hit.why.split()[2]) == (1, "13")
    assert found.hit(sample("Tell me: " + " ".join(said[2:14]) + " never")) is None
    assert found.hit(sample("Tell me", " ".join(said))).question == 1  # in the answer


def test_a_short_question_counts_as_a_whole(tmp_path):
    found = against(tmp_path, "What is 2 + 2?", LONG)
    assert found.hit(sample("what is  2 + 2")).question == 0
    assert found.hit(sample("what is 2 - 2?")) is None
    assert found.hit(sample("what is 2 + 2 + 2?")) is None
    assert found.hit(sample("Well?", "What is 2 + 2?")) is None


def test_what_many_questions_share_is_their_template(tmp_path):
    rule = "solve the task below step by step and write the last line as answer then the number"
    found = against(tmp_path, *(f"{rule} {LONG} {n} {rule}" for n in range(OF_TEMPLATE)), LONG[:40])
    assert found.hit(sample(f"{rule} how many apples are there?")) is None
    assert found.hit(sample(f"coast 7 {rule}")).question == 7  # with the number it is one's own
    few = against(tmp_path, f"{rule} one", f"{rule} two", "three")
    assert few.hit(sample(f"{rule} four")) is None
    one = against(tmp_path, f"{rule} one")
    assert one.hit(sample(f"{rule} four")).question == 0


def test_the_length_is_a_setting_and_questions_are_counted(tmp_path):
    found = against(tmp_path, LONG, LONG.upper(), "?!", length=4)
    assert found.hit(sample("at the old station at noon")).question == 0
    assert (len(found.questions), found.of_file) == (2, [0, 0])
    other = against(tmp_path, LONG, length=4)
    assert other.digest != found.digest
