"""Samples judged in both orders: each verdict's reward, each failure's count, the deduplication of
questions, and verdicts that survive a kill."""

import itertools
import threading

import numpy as np
import pytest
from judged import quoted, served, settings

from compass_jax.base.records import Prompt
from compass_jax.config import (
    ConfigError,
    DataConfig,
    EngineJudgeConfig,
    FileSource,
    RewardConfig,
    TaskSource,
)
from compass_jax.config.verifiers import Spread, smallest_gap, spread
from compass_jax.rewards.faults import NEVER, VerifierError
from compass_jax.rewards.joined import JoinedScorer
from compass_jax.rewards.judges.endpoint import (
    LATE,
    NONSENSE,
    REFUSED,
    UNREACHABLE,
    Batched,
    Pooled,
    Reply,
)
from compass_jax.rewards.judges.judging import (
    FAILURES,
    UNPARSABLE,
    Judge,
    Ruling,
    Verdicts,
    score_of,
)
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import encode_row
from compass_jax.rewards.verifiers.judge import BETTER, TIE, WORSE

SAYS = {BETTER: "so it is Better", TIE: "Tie", WORSE: "Worse"}
ROW = encode_row({"answer": "5", "best": ["6"]})
PROMPT = Prompt(1, 0, "x", "Which number is large?", np.zeros(1, np.int32), "5", ROW)
ANYWHERE = "http://127.0.0.1:1/v1"


def larger(messages):
    """Answers as a judge that prefers the larger number and cannot read anything except numbers."""
    content = messages[1]["content"]
    try:
        candidate, anchor = (float(quoted(content, name)) for name in ("Candidate", "Anchor"))
    except ValueError:
        return Reply("I cannot say.")
    return Reply("Reasons.\n" + SAYS[int(np.sign(candidate - anchor))])


def collected(judge, wait_s=None):
    """Returns {key: score} of all outstanding samples."""
    got = {}
    while judge.outstanding:
        got |= dict(judge.collect(wait_s))
    return got


def judged(texts, ask=larger, verdicts=None, **changed):
    """Returns {text: score} of responses."""
    config = settings(ANYWHERE, **changed)
    judge = Judge(config.anchor_field, Pooled(config, ask), verdicts)
    for text in texts:
        judge.submit(text, PROMPT, text)
    got = collected(judge)
    assert judge.collect(None) == []
    judge.close()
    return {text: got[text] for text in texts}


def test_better_tie_and_worse_are_one_a_half_and_nothing():
    got = judged(["6", "5", "4", "<think>\n9\n</think>4", "many"])
    assert [x.reward for x in got.values()] == [1, 0.5, 0, 0, 0]
    assert [x.known for x in got.values()] == [True] * 4 + [False]
    assert [x.components.get("judge_tie") for x in got.values()] == [0, 1, 0, 0, None]
    assert got["many"].outcome == "unjudged" and "I cannot say." in got["many"].detail


def test_an_empty_answer_is_worse_and_nobody_is_asked():
    requests = []

    def tie(messages):
        requests.append(messages)
        return Reply("Tie")

    scores = judged(["", " \n", "<think>\n9\n</think>\n", "5"], tie)
    assert [x.reward for x in scores.values()] == [0, 0, 0, 0.5]
    assert [x.known for x in scores.values()] == [True] * 4
    assert [x.components["judge_disagreed"] for x in scores.values()] == [0] * 4
    assert len(requests) == 1  # both orders of "5" and "5" are one question


def test_the_anchor_is_the_column_that_is_named():
    assert judged(["5.5"])["5.5"].reward == 1
    seen = []

    def ask(messages):
        seen.append(messages[1]["content"])
        return Reply("Tie")

    judged(["5.5"], ask, anchor_field="best")
    assert sorted(quoted(x, "Anchor") for x in seen) == ["5.5", '["6"]']
    assert all(quoted(x, "Question") == "Which number is large?" for x in seen)


@pytest.mark.parametrize(
    ("first", "swapped"), list(itertools.product((BETTER, TIE, WORSE, None), repeat=2))
)
def test_orders_that_disagree_are_a_tie_and_both_are_needed(first, swapped):
    rulings = [Ruling(x, "" if x is not None else UNPARSABLE, "why") for x in (first, swapped)]
    score = score_of(*rulings)
    if None in (first, swapped):
        assert not score.known and score.components["judge_unparsable"] == 1
        assert "judge_tie" not in score.components
        return
    expected = {1: 1.0, -1: 0.0}.get(first, 0.5) if first == -swapped else 0.5
    assert score.known and score.reward == expected
    assert score.components["judge_disagreed"] == float(first != -swapped)
    assert score.components["judge_tie"] == float(expected == 0.5)
    assert sum(score.components[f"judge_{name}"] for name in FAILURES) == 0


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [(LATE, "timeout"), (UNREACHABLE, "error"), (NONSENSE, "error"), (REFUSED, "error")],
)
def test_a_failure_leaves_the_sample_out_is_counted_and_told_once(failure, outcome, caplog):
    def ask(messages):
        bad = "> bad" in messages[1]["content"]
        return Reply("", failure, "the reason") if bad else Reply("Tie")

    got = judged(["good", "bad 1", "bad 2"], ask)
    assert [x.known for x in got.values()].count(True) == 1 and got["good"].reward == 0.5
    for name in ("bad 1", "bad 2"):
        assert (got[name].outcome, got[name].detail) == (outcome, "the reason")
        counted = {key for key, value in got[name].components.items() if value}
        assert counted == {f"judge_{failure}"}
    warnings = [x.getMessage() for x in caplog.records if "the reason" in x.getMessage()]
    assert len(warnings) == 1 and f"reward/judge_{failure}/mean" in warnings[0]


@pytest.mark.parametrize("failure", [REFUSED, UNREACHABLE, LATE, NONSENSE])
def test_a_judge_without_one_verdict_ends_the_run(failure):
    texts = [str(n) for n in range(2 * NEVER)]
    remedy = "Mend the judge or the rows" if failure == REFUSED else "the same command goes on then"
    with pytest.raises(VerifierError, match=f"{failure}: the reason.*{remedy}"):
        judged(texts, lambda messages: Reply("", failure, "the reason"))


def failing_judge(verdicts=None, down=None):
    """Returns a judge whose endpoint cannot be reached until `down` is cleared, and `down`."""
    down = [True] if down is None else down

    def ask(messages):
        return Reply("", UNREACHABLE, "away") if down else larger(messages)

    return Judge("answer", Pooled(settings(ANYWHERE, requests=1), ask), verdicts), down


def test_fewer_failures_than_end_a_run_are_collected_and_counted_on():
    judge, _ = failing_judge()
    for n in range(NEVER - 2):
        judge.submit(n, PROMPT, str(n))
    scores = collected(judge)
    assert sorted(scores) == list(range(NEVER - 2))
    assert all(score.outcome == "error" for score in scores.values())
    for n in range(2):
        judge.submit(n, PROMPT, f"1{n}")
    with pytest.raises(VerifierError, match=f"{NEVER} samples failed and none was judged"):
        collected(judge)
    judge.close()


def test_a_judge_that_has_answered_once_may_be_away(tmp_path):
    judge, down = failing_judge()
    judge.submit("early", PROMPT, "4")
    assert judge.collect(0.5)[0][1].outcome == "error"
    down.clear()
    judge.submit("now", PROMPT, "6")
    assert judge.collect(None)[0][1].reward == 1
    down.append(True)
    for n in range(2 * NEVER):
        judge.submit(n, PROMPT, f"7{n}")
    scores = collected(judge)
    assert len(scores) == 2 * NEVER and not any(score.known for score in scores.values())
    judge.close()


def test_a_judge_that_answers_without_a_verdict_does_not_end_the_run():
    texts = [str(n) for n in range(2 * NEVER)]
    got = judged(texts, lambda messages: Reply("I cannot say."))
    assert {x.outcome for x in got.values()} == {"unjudged"}


def test_no_more_requests_are_under_way_than_may_be_and_equal_questions_are_asked_once():
    with served(lambda n, body: 0.05) as (at, seen):
        judge = Judge("answer", Pooled(settings(at, requests=3)))
        for n in range(12):
            judge.submit(n, PROMPT, lambda n=n: str(n % 6))
        got = collected(judge)
        judge.close()
    assert seen.most_at_once == 3 and len(got) == 12
    assert all(score.reward == 0.5 for score in got.values())
    # There are six texts, one of which is the anchor: its two orders are one question.
    assert len(seen.requests) == 11


def test_a_text_that_cannot_be_made_is_raised_to_who_waits():
    def panic():
        raise SystemError("the tokenizer panicked")

    judge = Judge("answer", Pooled(settings(ANYWHERE), larger))
    judge.submit("a", PROMPT, panic)
    with pytest.raises(SystemError, match="panicked"):
        judge.collect(None)
    judge.submit("b", PROMPT, "6")
    assert judge.collect(5)[0][1].reward == 1
    judge.submit("c", PROMPT, "7")
    judge.close()


def test_a_fault_of_who_asks_is_raised_and_nobody_waits_for_ever():
    def ask(messages):
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        judged(["6"], ask)


def test_verdicts_outlive_a_kill_and_what_was_not_known_is_asked_again(tmp_path):
    """The first run is killed in the middle of a line; the second one repeats the questions that
    failed.
    """
    questions = []

    def ask(messages, down=("4",)):
        content = messages[1]["content"]
        text = quoted(content, "Candidate") + quoted(content, "Anchor")
        questions.append(text)
        return Reply("", UNREACHABLE, "down") if set(text) & set(down) else larger(messages)

    first = judged(["6", "4", "5"], ask, Verdicts(tmp_path))
    assert [first[x].known for x in "645"] == [True, False, True] and len(questions) == 5
    path = tmp_path / "verdicts.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    path.write_text("\n".join([*lines[:2], lines[2][:20]]))
    (tmp_path / "verdicts1.jsonl").write_text('nonsense\n[]\n{"asked": "zz", "verdict": 1}\n')
    questions.clear()
    second = judged(["6", "4", "5"], lambda m: ask(m, down=()), Verdicts(tmp_path))
    assert {x: second[x] for x in "65"} == {x: first[x] for x in "65"} and second["4"].reward == 0
    assert len(questions) == 3, "the question whose line was cut short, and two of 4"
    assert len(path.read_text().splitlines()) == 6
    questions.clear()
    assert judged(["6", "4", "5"], ask, Verdicts(tmp_path)) == second and not questions
    judged(["6"], ask, Verdicts(tmp_path), model="another")
    assert len(questions) == 2, "another judge's verdicts are not this one's"


def test_an_engine_of_our_own_is_asked_all_questions_at_once_by_who_waits():
    batches, asker = [], Batched(EngineJudgeConfig())

    def generate(questions):
        batches.append((threading.current_thread(), len(questions)))
        return [larger(messages) for messages in questions]

    judge = Judge("answer", asker)
    for text in ("6", "5", "4"):
        judge.submit(text, PROMPT, lambda text=text: text)
    with pytest.raises(ConfigError, match="compass serve"):
        judge.collect(None)
    judge.close()
    asker, judge = Batched(EngineJudgeConfig()), None
    judge = Judge("answer", asker)
    asker.generate = generate
    for text in ("6", "5", "4"):
        judge.submit(text, PROMPT, lambda text=text: text)
    assert judge.collect(0) == [] and not batches, "who does not wait runs nothing"
    assert {key: x.reward for key, x in judge.collect(None)} == {"6": 1, "5": 0.5, "4": 0}
    assert batches == [(threading.current_thread(), 5)] and not judge.outstanding
    judge.submit("again", PROMPT, "6")
    assert judge.collect(None)[0][1].reward == 1 and len(batches) == 1
    asker.version = 1
    judge.submit("later", PROMPT, "6")
    assert judge.collect(None)[0][1].reward == 1
    assert len(batches) == 2, "other weights may say something else"
    judge.close()


DATA = DataConfig(
    sources=(
        FileSource("a.jsonl", verifier="judge"),
        FileSource(
            "b.jsonl",
            verifier={"judge": 2.0, "exact": 0.5, "length": 0.25},
            verifier_args={"most_chars": 1},
            gold="exact",
        ),
        FileSource("c.jsonl", verifier="exact"),
    )
)


def test_judge_and_workers_make_one_score_whoever_is_first():
    slow = threading.Event()

    def ask(messages):
        if "> slow" in messages[1]["content"]:
            slow.wait(5)
            return Reply("Tie")
        away = "> away" in messages[1]["content"]
        return Reply("", UNREACHABLE, "away") if away else larger(messages)

    cases = [(0, "6"), (1, "6"), (1, "5"), (2, "5"), (1, "away"), (0, "slow"), (2, "slow")]
    prompts = [Prompt(1, i, "x", "q", np.zeros(1, np.int32), "5", ROW) for i in range(3)]
    judge = Judge("answer", Pooled(settings(ANYWHERE), ask))
    got, order = {}, []
    with JoinedScorer(Scorer(RewardConfig(answer_tag=""), DATA), DATA, judge) as scorer:
        for source, text in cases:
            scorer.submit((source, text), prompts[source], text)
        with pytest.raises(ValueError, match="submitted twice"):
            scorer.submit(cases[0], prompts[0], "6")
        while scorer.outstanding:
            for key, score in scorer.collect(block=True):
                got[key] = score
                order.append(key)
            if len(got) == len(cases) - 1:
                slow.set()
    rewards = {key: (x.reward if x.known else None) for key, x in got.items()}
    assert rewards == {
        (0, "6"): 1.0,
        (1, "6"): 2.25,
        (1, "5"): 1.75,
        (2, "5"): 1.0,
        (1, "away"): None,
        (0, "slow"): 0.5,
        (2, "slow"): 0.0,
    }
    assert order[-1] == (0, "slow")
    parts = got[1, "5"].components
    assert {k: parts[k] for k in ("judge", "exact", "length_reward", "gold")} == {
        "judge": 0.5,
        "exact": 1,
        "length_reward": 1,
        "gold": 1,
    }
    assert got[1, "away"].outcome == "error" and got[1, "away"].components["judge_unreachable"] == 1


def sure(messages):
    """Returns a verdict whose entropy is a tenth of the candidate's number."""
    reply = larger(messages)
    return reply._replace(entropy_nats=int(quoted(messages[-1]["content"], "Candidate")) / 10)


@pytest.mark.parametrize("limit, rewards", [(0.0, (1, 0)), (0.6, (0.5, 0)), (0.4, (0.5, 0.5))])
def test_an_unsure_verdict_is_a_tie_also_after_a_kill(tmp_path, limit, rewards):
    """Against the anchor 5, the two orders of 7 have entropies of 0.7 and 0.5, those of 3 of 0.3
    and 0.5. An order that is unsure counts as a Tie, and then the two orders disagree.
    """
    config = EngineJudgeConfig(unsure_nats=limit)
    scores = []
    for is_second_run in (False, True):
        asker = Batched(config)
        asker.generate = (
            (lambda questions: 1 / 0)
            if is_second_run
            else (lambda questions: list(map(sure, questions)))
        )
        judge = Judge("answer", asker, Verdicts(tmp_path))
        for text in ("7", "3"):
            judge.submit(text, PROMPT, text)
        scores.append(collected(judge))
        judge.close()
    assert scores[0] == scores[1]
    assert tuple(scores[0][text].reward for text in ("7", "3")) == rewards
    entropies = [scores[0][text].components["judge_entropy_nats"] for text in ("7", "3")]
    assert entropies == pytest.approx([0.6, 0.4])
    # An endpoint reports no entropy.
    assert "judge_entropy_nats" not in judged(["6"])["6"].components


def test_an_answer_that_breaks_the_form_is_worse_whatever_the_judge_says():
    """The judge prefers the larger number; the form is an integer of two digits."""
    form = {"judge": 1.0, "regex": 0.25}
    source = FileSource("a.jsonl", verifier=form, verifier_args=(("pattern", r"\d\d"),))
    data = DataConfig(sources=(source,))
    prompt = Prompt(1, 0, "x", "q", np.zeros(1, np.int32), "5", ROW)
    rewards, components = {}, {}
    for needs_form in (False, True):
        judge = Judge("answer", Pooled(settings(ANYWHERE), larger))
        scorer = Scorer(RewardConfig(answer_tag=""), data)
        with JoinedScorer(scorer, data, judge, needs_form=needs_form) as joined:
            for text in ("66", "6", "04", "many"):
                joined.submit(text, prompt, text)
            got = collected(joined, True)
        rewards[needs_form] = {key: x.reward if x.known else None for key, x in got.items()}
        components[needs_form] = {key: x.components.get("judge_form") for key, x in got.items()}
    # For a text that it cannot read, the judge has no verdict, but the form has one.
    assert rewards[False] == {"66": 1.25, "6": 1.0, "04": 0.25, "many": None}
    assert rewards[True] == {"66": 1.25, "6": 0.0, "04": 0.25, "many": 0.0}
    assert set(components[False].values()) == {None}
    assert components[True] == {"66": 0, "6": 1, "04": 0, "many": 1}
    with pytest.raises(ConfigError, match="judge_needs_form: there is no judge"):
        RewardConfig(judge_needs_form=True).validate()


def test_the_judge_of_a_task_has_its_weight(tmp_path):
    (tmp_path / "judged_task.py").write_text(
        "from compass_jax.rewards.tasks import Task\n"
        "def rows(seed):\n    yield {'prompt': 'q', 'answer': '5'}\n"
        "def even(response):\n    return float(int(response) % 2 == 0)\n"
        "both = Task(rows, {'judge': 0.5, even: 0.25})\n"
        "alone = Task(rows, 'judge')\n"
    )
    names = [f"{tmp_path}/judged_task.py:{name}" for name in ("both", "alone")]
    data = DataConfig(sources=tuple(map(TaskSource, names)))
    judge = Judge("answer", Pooled(settings(ANYWHERE), larger))
    with JoinedScorer(Scorer(RewardConfig(), data), data, judge) as scorer:
        for source in (0, 1):
            prompt = Prompt(1, source, "x", "q", np.zeros(1, np.int32), "5", ROW)
            scorer.submit(source, prompt, "6")
        got = collected(scorer, True)
    assert {key: x.reward for key, x in got.items()} == {0: 0.75, 1: 1.0}


def test_the_guard_of_shaping_knows_the_judges_steps():
    source = FileSource("a.jsonl", verifier={"judge": 1.0, "exact": 0.25})
    assert spread(source) == Spread(0.0, 1.25, 0.25)
    alone = FileSource("a.jsonl", verifier="judge")
    assert spread(alone) == Spread(0.0, 1.0, 0.5)
    assert smallest_gap([("data.sources[0]", alone)], RewardConfig()) == (0.5, "data.sources[0]")
    with pytest.raises(ConfigError, match="did you mean 'judge'"):
        DataConfig(sources=(FileSource("a.jsonl", verifier="jugde"),)).validate()
