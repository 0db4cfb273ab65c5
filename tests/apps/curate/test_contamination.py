"""Evaluation questions are found in training rows by a run of words, short ones in full."""

import json

from compass_jax.apps.curate.contamination import OF_TEMPLATE, Contamination
from compass_jax.apps.curate.sample import Sample

LONG = "a train leaves the old station at noon and travels sixty miles an hour to the far coast"


def sample(question, answer="yes"):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Sample("x", messages, (), 3)


def against(tmp_path, *questions, length=13):
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps({"prompt": q, "answer": "4"}) + "\n" for q in questions))
    return Contamination([str(path)], length, lambda line: None)


def test_a_run_of_words_is_enough_and_one_less_is_not(tmp_path):
    contamination = against(tmp_path, "What is 2 + 2?", LONG)
    words = LONG.split()
    hit = contamination.hit(sample("Tell me: " + " ".join(words[2:15]).upper() + "."))
    assert hit is not None and (hit.question, hit.why.split()[2]) == (1, "13")
    assert contamination.hit(sample("Tell me: " + " ".join(words[2:14]) + " never")) is None
    assert contamination.hit(sample("Tell me", " ".join(words))).question == 1  # in the answer


def test_a_short_question_counts_as_a_whole(tmp_path):
    contamination = against(tmp_path, "What is 2 + 2?", LONG)
    assert contamination.hit(sample("what is  2 + 2")).question == 0
    assert contamination.hit(sample("what is 2 - 2?")) is None
    assert contamination.hit(sample("what is 2 + 2 + 2?")) is None
    assert contamination.hit(sample("Well?", "What is 2 + 2?")) is None


def test_what_many_questions_share_is_their_template(tmp_path):
    rule = "solve the task below step by step and write the last line as answer then the number"
    contamination = against(
        tmp_path, *(f"{rule} {LONG} {n} {rule}" for n in range(OF_TEMPLATE)), LONG[:40]
    )
    assert contamination.hit(sample(f"{rule} how many apples are there?")) is None
    assert (
        contamination.hit(sample(f"coast 7 {rule}")).question == 7
    )  # the number makes the run unique
    few = against(tmp_path, f"{rule} one", f"{rule} two", "three")
    assert few.hit(sample(f"{rule} four")) is None
    one = against(tmp_path, f"{rule} one")
    assert one.hit(sample(f"{rule} four")).question == 0


def test_the_length_is_a_setting_and_questions_are_counted(tmp_path):
    contamination = against(tmp_path, LONG, LONG.upper(), "?!", length=4)
    assert contamination.hit(sample("at the old station at noon")).question == 0
    assert (len(contamination.questions), contamination.of_file) == (2, [0, 0])
    other = against(tmp_path, LONG, length=4)
    assert other.digest != contamination.digest
