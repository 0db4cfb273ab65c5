"""Notices about rewards without information, with a sample, at which --strict ends the run; and
about a reward file that changed before a resume.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run

from compass_jax.base.errors import STRICT
from compass_jax.base.records import Group, Prompt, Rollout, Score
from compass_jax.config import DataConfig, FileSource, RewardConfig, TaskSource
from compass_jax.config.verifiers import looked_for
from compass_jax.experience.judged import (
    ALL_RIGHT,
    ALL_WRONG,
    KINDS,
    NO_GROUP_VARIES,
    NOTHING_EXTRACTED,
    extracted_frac,
    group_shares,
    no_advantage,
    quoted,
    sample_of,
    silence,
    silence_warning,
)
from compass_jax.rewards.checks import changed, code_of
from compass_jax.training.hooks.notices import Notices
from compass_jax.training.rl import run_rl


def notices_of(config, *args, **options):
    """Calls `Notices` with what it reads of a run's settings."""
    return Notices(config.rl, config.policy, config.scored, *args, **options)


REWARDS = RewardConfig()
WRONG, RIGHT, HALF = Score(0.0, True), Score(1.0, True), Score(0.5, True)
NOTHING = Score(0.0, True, extracted=False)
LOST = Score(0.0, False, "timeout", extracted=False)
UNJUDGED = Score(0.0, False, "unjudged", extracted=False)


def test_groups_by_kind_sum_to_one_and_answers_are_counted_where_a_check_ended():
    groups = [[RIGHT, WRONG], [RIGHT, RIGHT, LOST], [WRONG, NOTHING], [HALF, HALF], [RIGHT, LOST]]
    assert group_shares(groups, REWARDS) == dict.fromkeys(KINDS, 0.2)
    assert extracted_frac([RIGHT, WRONG, NOTHING, UNJUDGED, LOST]) == 0.5
    assert math.isnan(extracted_frac([LOST, LOST]))


@pytest.mark.parametrize(
    ("scores", "kind"),
    [
        ([NOTHING, UNJUDGED, LOST], NOTHING_EXTRACTED),
        ([UNJUDGED], NOTHING_EXTRACTED),
        ([NOTHING, WRONG], ALL_WRONG),
        ([WRONG, WRONG, LOST], ALL_WRONG),
        ([WRONG, HALF], ""),
        ([Score(0.1, True, extracted=False), WRONG], ""),
        ([LOST, LOST], ""),
        ([], ""),
    ],
)
def test_what_counts_as_silence(scores, kind):
    assert silence(scores, REWARDS) == kind


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        ([[RIGHT, RIGHT], [RIGHT, RIGHT]], ALL_RIGHT),
        ([[RIGHT, RIGHT, LOST], [RIGHT, LOST]], ALL_RIGHT),
        ([[RIGHT, RIGHT], [WRONG, WRONG]], NO_GROUP_VARIES),
        ([[HALF, HALF], [HALF, HALF]], NO_GROUP_VARIES),
        ([[RIGHT, RIGHT], [HALF, HALF]], NO_GROUP_VARIES),
        ([[RIGHT, RIGHT], [RIGHT, WRONG]], ""),
        ([[WRONG, WRONG]], ""),  # `silence` names it
        ([[RIGHT, LOST], [LOST, LOST]], ""),
        ([], ""),
    ],
)
def test_what_counts_as_a_rollout_without_advantages(groups, kind):
    assert no_advantage(groups, REWARDS) == kind


def test_a_text_is_shown_on_one_line_without_what_moves_a_terminal():
    assert quoted('a\nb\x1b[31m\u202e\x00"é') == '"a\\nb\\x1b[31m\\u202e\\x00"é"'
    long = quoted("x" * 5000 + "\n" + "y" * 5000)
    assert len(long) < 700 and "[... 9,401 characters ...]" in long and long.endswith('yyy"')


def rollout(prompt, text, truncated=False):
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    return Rollout(prompt, 0, tokens, zeros, zeros, truncated, tokens, 0)


def groups_of(score, texts=("cut", "whole")):
    prompt = Prompt(1, 0, "x", "How\nmany?", np.zeros(0, np.int32), "72")
    rollouts = tuple(rollout(prompt, text, text == "cut") for text in texts)
    return [Group(prompt, rollouts, (score,) * len(texts))]


def decode(rollout):
    return bytes(rollout.response.astype(np.uint8)).decode()


def config_with(verifier="math", **rewards):
    base = tiny_run()
    data = DataConfig(sources=(FileSource("rows.jsonl", verifier=verifier),))
    return dataclasses.replace(base, data=data, rewards=RewardConfig(**rewards))


def test_the_warning_has_a_whole_sample_what_was_looked_for_and_the_option():
    config = config_with()
    sample, parts = sample_of(groups_of(NOTHING), decode), (config.rewards, config.data)
    assert sample[1] == "whole"  # the other sample was cut off, perhaps before its answer
    warning = silence_warning(
        NOTHING_EXTRACTED, "of the first rollout", sample, [NOTHING] * 16, *parts
    )
    assert warning.splitlines() == [
        "warning: no answer could be extracted from any of the 16 responses of the first rollout",
        "  looked for: the text in the last <answer>...</answer>, else in the last \\boxed{...},"
        " else after the last ####",
        '  to change it: set --data.system-prompt "Think step by step, then write the final answer'
        ' alone between <answer> and </answer>.", or set rewards.answer_tag: another tag, or empty'
        " for the whole response; or judge by another data.sources[0].verifier",
        '  prompt:    "How\\nmany?"',
        '  response:  "whole"',
        '  reference: "72"   reward: 0 (ok)',
    ]
    warning = silence_warning(ALL_WRONG, "of the evaluation", sample, [WRONG] * 16, *parts)
    assert "all 16 responses of the evaluation are wrong" in warning and "answer_field" in warning


def test_the_warning_counts_no_response_without_a_verdict():
    config, sample = config_with(), sample_of(groups_of(WRONG), decode)
    for kind, scores, words in (
        (ALL_WRONG, [WRONG, WRONG, LOST, UNJUDGED], "all 2 judged responses of a rollout are wro"),
        (ALL_RIGHT, [RIGHT, LOST], "all 1 judged responses of a rollout are right"),
        (NOTHING_EXTRACTED, [NOTHING, UNJUDGED, LOST], "any of the 2 judged responses of a"),
        (NO_GROUP_VARIES, [HALF, HALF, LOST], "are equal (2 judged responses)"),
    ):
        parts = config.rewards, config.data
        assert words in silence_warning(kind, "of a rollout", sample, scores, *parts)


def test_what_was_looked_for():
    assert looked_for(FileSource("a.jsonl"), "") == "the whole response"
    form = FileSource("a.jsonl", verifier={"format": 1.0})
    assert looked_for(form, "answer").startswith("nothing: these verifiers judge the form")
    mixed = FileSource("a.jsonl", verifier={"json": 1.0, "m:f": 1.0})
    assert looked_for(mixed, "box").endswith(
        "in a block between ``` marks, else all of it; what m:f reads"
    )
    assert looked_for(TaskSource("m:task"), "x") == "what m:task reads"


def test_the_first_rollout_is_told_and_later_ones_only_where_no_answer_is_found():
    messages = []
    notices = notices_of(config_with(), messages.append)
    notices.of_rewards(groups_of(WRONG), decode)
    assert messages[0] == (
        "first rollout: 1 groups: 0 varied, 0 all right, 1 all wrong, 0 between, 0 undecided;"
        " an answer in 100% of 2 responses"
    )
    assert "are wrong: no verifier teaches anything" in messages[1]
    for score in (WRONG, NOTHING, NOTHING):
        notices.of_rewards(groups_of(score), decode)
    assert len(messages) == 3 and "any of the 2 responses of a rollout" in messages[2]
    notices_of(config_with(), messages.append).of_rewards(groups_of(RIGHT), decode)
    assert "1 all right" in messages[3]
    assert messages[4].startswith(
        "warning: all 2 responses of the first rollout are right: every advantage of the verifiers"
        " is 0\n  looked for: "
    )
    assert "take harder prompts" in messages[4] and "rewards.right_at = 1" in messages[4]
    notices = notices_of(config_with(), messages.append)
    notices.end = lambda: messages.append("ended")
    notices.of_rewards(groups_of(NOTHING), decode)
    assert messages[-1] == "ended"


def test_a_rollout_without_advantages_is_warned_of_once_and_only_where_a_run_begins():
    messages = []
    notices = notices_of(config_with(), messages.append)
    notices.of_rewards([*groups_of(RIGHT), *groups_of(WRONG)], decode)
    assert messages[1].startswith(
        "warning: in every group of the first rollout all rewards are equal"
    )
    assert "(4 responses)" in messages[1] and len(messages) == 2
    notices.of_rewards(groups_of(RIGHT), decode)
    assert len(messages) == 2  # a later step that is all right is the aim of training
    varied = dataclasses.replace(groups_of(RIGHT)[0], scores=(RIGHT, WRONG))
    for score in (RIGHT, HALF):
        messages.clear()
        notices_of(config_with(), messages.append).of_rewards([varied, *groups_of(score)], decode)
        assert len(messages) == 1


def test_strict_ends_over_all_right_and_not_over_a_rollout_that_varies_by_chance_in_no_group():
    for groups, ends in ((groups_of(RIGHT), True), ([*groups_of(RIGHT), *groups_of(WRONG)], False)):
        notices = notices_of(config_with(), lambda text: None)
        ended: list[bool] = []
        notices.end = lambda ended=ended: ended.append(True)
        notices.of_rewards(groups, decode)
        assert ended == [True] * ends


def test_a_run_that_goes_on_has_no_first_rollout_and_is_warned_all_the_same():
    messages = []
    notices = notices_of(config_with(), messages.append, done_steps=3)
    notices.of_rewards(groups_of(WRONG), decode)
    (message,) = messages
    assert message.startswith("warning: all 2 responses of a rollout are wrong")


def test_the_first_rollout_says_how_many_have_no_verdict_and_why():
    messages = []
    (group,) = groups_of(RIGHT, ("a", "b", "c", "d"))
    error = Score(0.0, False, "error", "KeyError: 'a'", extracted=False)
    group = dataclasses.replace(group, scores=(RIGHT, WRONG, error, LOST))
    notices_of(config_with(), messages.append).of_rewards([group], decode)
    assert messages[0].endswith(
        "; an answer in 100% of 2 responses; 2 of 4 have no verdict (1 error, 1 timeout) and are"
        " left out: KeyError: 'a'"
    )
    notices_of(config_with(), messages.append).of_rewards(groups_of(error), decode)
    assert messages[1].endswith("; a verdict on none of 2 responses (2 error): KeyError: 'a'")


def test_code_that_changed_is_named_with_its_hashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(response): return 1.0\n")
    source = FileSource("a.jsonl", verifier={"mine.py:f": 1.0, "mine:f": 1.0, "math": 1.0})
    before = code_of(DataConfig(sources=(source,)))
    assert [name for name, _ in before] == [f"{tmp_path}/mine.py:f", "mine:f"]
    assert len({digest for _, digest in before}) == 1 and changed(before, before) == []
    (tmp_path / "mine.py").write_text("def f(response): return 2.0\n")
    messages = changed(before, code_of(DataConfig(sources=(source,))))
    assert len(messages) == 2 and messages[0].startswith(f"{tmp_path}/mine.py:f was changed since")
    assert before[0][1] in messages[0]


def test_strict_ends_a_run_whose_answers_nobody_finds_and_the_next_start_goes_on(tmp_path, capsys):
    """The first rollout is kept, and the run that continues without --strict trains on it. The
    reward file has changed by then, and a notice names it.
    """
    user_file = tmp_path / "mine.py"
    user_file.write_text("def f(response): return {'reward': 0.0, 'extracted': False}\n")
    base = tiny_run(f"{user_file}:f")
    config = evolve(base, run_dir=f"{tmp_path}/run", rl={"steps": 1, "eval_every": 0})
    result = run_rl(config, strict=True)
    output = capsys.readouterr().out
    assert (result["stopped"], result["status"], result["steps"]) == (True, STRICT, 0)
    assert output.count("warning: no answer could be extracted from any of the 16 responses") == 1
    assert (
        f"looked for: what {user_file}:f reads" in output
        and "stopped by --strict in step 1" in output
    )
    code = json.loads((tmp_path / "run" / "config.json").read_text())["rewards"]["code"]
    assert code[0][0] == f"{user_file}:f" and len(code[0][1]) == 16

    user_file.write_text(user_file.read_text() + "# another\n")
    assert not run_rl(config)["stopped"]
    output = capsys.readouterr().out
    assert f"warning: {user_file}:f was changed since" in output and code[0][1] in output
    assert "responses of the evaluation" in output
    (row,) = lines(tmp_path / "run")
    metrics = row["metrics"]
    assert metrics["reward/extracted_frac"] == 0 and metrics["groups/all_wrong_frac"] == 1
    after = json.loads((tmp_path / "run" / "config.json").read_text())["rewards"]["code"]
    assert after[0][1] != code[0][1]
