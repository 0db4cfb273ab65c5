"""The logged groups on a page: as many as there is room for, whatever the logs hold."""

import json

import pytest
from logs import write_episodes

from compass_jax.runs.report import ReportError
from compass_jax.runs.report.embed import size_of
from compass_jax.runs.report.samples import (
    LEAST_TEXT,
    MOST_TEXT,
    evenly,
    read_groups,
    read_samples,
    tool_errors,
)

PLENTY = 10**8


def group(step, responses=("a", "b"), **more):
    samples = [
        {"response": x, "reward": float(i), "outcome": "ok", "tokens": 1, "truncated": False}
        for i, x in enumerate(responses)
    ]
    row = {"prompt": "1+1", "label": "sum", "answer": "2", "visit": 0, "samples": samples}
    return {"stage": "rl", "step": step, **row, **more}


def numbers(step, group, count=1):
    values = {"text": [1] * count, "entropy": [0.5] * count, "version": 3, "odd": "left out"}
    sample = {"sample": 1, "tokens": count, **values}
    means = {"advantage": [-1, 1]}
    return {"stage": "rl", "step": step, "group": group, "means": means, "samples": [sample]}


def write(path, rows, end="\n"):
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)


def test_any_beginning_of_the_order_lies_evenly():
    assert list(evenly(9))[:5] == [8, 0, 4, 6, 2]
    for count in (0, 1, 2, 7, 100):
        assert sorted(evenly(count)) == list(range(count))


def test_groups_get_the_numbers_of_their_tokens_by_step_and_place(tmp_path):
    write(tmp_path / "rollouts.jsonl", [group(1), group(1, ("c", "d")), group(2)])
    write(tmp_path / "tokens.jsonl", [numbers(1, 1), numbers(2, 0)])
    groups, logged = read_samples(tmp_path, "rl", PLENTY)
    assert logged == 3 and [(g["step"], g["group"]) for g in groups] == [(1, 0), (1, 1), (2, 0)]
    assert ["values" in s for g in groups for s in g["samples"]] == [0, 0, 0, 1, 0, 1]
    assert groups[1]["samples"][1]["values"] == {"text": [1], "entropy": [0.5], "version": 3}
    assert [s["means"]["advantage"] for s in groups[2]["samples"]] == [-1, 1]


def test_what_has_no_room_is_left_out_evenly_and_counted(tmp_path):
    write(tmp_path / "rollouts.jsonl", [group(step) for step in range(1, 101)])
    one = size_of(read_samples(tmp_path, "rl", PLENTY)[0][0])
    groups, logged = read_samples(tmp_path, "rl", 5 * one + one // 2)
    assert logged == 100 and [g["step"] for g in groups] == [1, 25, 50, 75, 100]
    write(tmp_path / "tokens.jsonl", [numbers(step, 0, 50) for step in range(1, 101)])
    groups, _ = read_samples(tmp_path, "rl", 120 * one)  # 15% are reserved for the numbers
    assert len(groups) == 100 and size_of(groups) < 121 * one
    with_numbers = [g["step"] for g in groups if "values" in g["samples"][1]]
    assert 2 <= len(with_numbers) < 40 and with_numbers[-1] == 100


def test_a_long_text_keeps_its_beginning_and_its_end(tmp_path):
    long = "b" * 100_000 + "the end"
    write(tmp_path / "rollouts.jsonl", [group(1, (long,), prompt=long)])
    (logged_group,), _ = read_samples(tmp_path, "rl", PLENTY)
    for text in (logged_group["prompt"], logged_group["samples"][0]["response"]):
        assert text["head"].startswith("bbb") and text["tail"].endswith("bthe end")
        assert len(text["head"]) + len(text["tail"]) == MOST_TEXT
        assert text["left_out"] == len(long) - MOST_TEXT


def test_a_response_of_several_parts_is_split_into_what_was_given_and_what_was_sampled(tmp_path):
    (logged_group,), _ = read_samples(write_episodes(tmp_path), "rl", PLENTY)
    played, lost = logged_group["samples"]
    assert [(x["given"], x["time_s"]) for x in played["parts"]] == [
        (True, 0.25),
        (False, 1.5),
        (True, 0.125),
        (False, 12),
    ]
    texts = [x["text"] for x in played["parts"]]
    assert texts[0] == "user\nHow much?\n" and texts[3] == "It is 3."
    assert [x.get("errors") for x in played["parts"]] == [None, None, ["price: no tea"], None]
    assert "response" not in played and played["episode"]["end"] == "turns"
    assert lost["response"] == "" and lost["error"] == "the shop is closed"
    # compass show and the commands that read groups have the whole text
    (whole,) = read_groups(tmp_path)
    assert whole["samples"][0]["response"] == "".join(texts)


def test_the_parts_of_a_long_response_share_its_room(tmp_path):
    part = {"by": "model", "chars": 30_000, "tokens": 1}
    for count in (2, 100):
        row = group(1, ("b" * 30_000 * count,))
        row["samples"][0]["parts"] = [part] * count
        write(tmp_path / "rollouts.jsonl", [row])
        (logged_group,), _ = read_samples(tmp_path, "rl", PLENTY)
        shown = [x["text"] for x in logged_group["samples"][0]["parts"]]
        sizes = {len(x["head"]) + len(x["tail"]) for x in shown}
        assert sizes == {max(MOST_TEXT // count, LEAST_TEXT)} and len(shown) == count
        assert {x["left_out"] for x in shown} == {30_000 - sizes.pop()}


def test_the_errors_of_tools_are_found_in_what_an_environment_said():
    text = 'a {"error": "no tea"} {"error" : {"code": 7}} {"error": unfinished'
    assert tool_errors(text) == ["no tea", "{'code': 7}"]
    assert tool_errors('{"result": "no error"}') == []
    assert tool_errors('{"error": ' + "[" * 100_000) == []
    assert len(tool_errors('{"error": 1}' * 100)) == 8


def test_a_run_of_an_earlier_version_still_has_its_samples(tmp_path):
    old = {"step": 1, "prompt": "1+1", "samples": [{"response": "2", "reward": 1}]}
    write(tmp_path / "rollouts.jsonl", [old])
    (logged_group,), _ = read_samples(tmp_path, "rl", PLENTY)
    assert logged_group["samples"][0] == {
        "response": "2",
        "reward": 1,
        "outcome": "ok",
        "tokens": None,
        "truncated": False,
        "components": {},
    }


def test_a_log_that_is_being_written_is_read_to_its_last_whole_line(tmp_path):
    line = json.dumps(group(1)) + "\n"
    for cut in (1, len(line) // 2, len(line) - 1):
        (tmp_path / "rollouts.jsonl").write_text(line + line[:cut])
        assert len(read_samples(tmp_path, "rl", PLENTY)[0]) == 1
    assert read_samples(tmp_path / "nothing", "rl", PLENTY) == ([], 0)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("rollouts", '{"stage": "rl", "step": 1, "samples": 3}', "line 2: it is damaged"),
        ("rollouts", "[]", "line 2: it is damaged"),
        ("rollouts", '{"stage": "rl", "st', "line 2: it is damaged"),
        ("rollouts", "\x00\x00", "line 2: it is damaged"),
        (
            "rollouts",
            json.dumps(group(1) | {"samples": [{"response": "", "parts": [1]}]}),
            "damaged",
        ),
        ("tokens", '{"stage": "rl", "step": 1, "group": 0}', "line 1: it is damaged.*means"),
        ("tokens", json.dumps(numbers(1, 0) | {"samples": [{"sample": 0}]}), "damaged.*text"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, name, line, message):
    write(tmp_path / "rollouts.jsonl", [group(1)])
    with open(tmp_path / f"{name}.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ReportError, match=f"{name}.jsonl, .*{message}"):
        read_samples(tmp_path, "rl", PLENTY)
