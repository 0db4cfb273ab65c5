"""`compass distil` keeps the right answers, from an endpoint and from our engine, also after a
stop.
"""

import json

import pytest
from judged import served
from tiny import random_params
from tiny_run import TOKENIZER, tiny_run

from compass_jax.apps.curate import distil as module
from compass_jax.apps.curate.distil import Answer, TeacherError, chosen, distil
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError, DataConfig, FileSource, RunConfig, SFTConfig
from compass_jax.config.distil import DistilConfig
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.data.sft import conversations
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience import evaluate
from compass_jax.rewards.judges import endpoint
from compass_jax.runs.rundir import FolderLock, RunDirectoryInUse
from compass_jax.training.from_files import engine_config
from compass_jax.weights.hf import save_params
from examples.shop import shop

SUMS = [(2, 3), (4, 5), (1, 1)]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{a} + {b}?", "answer": str(a + b)} for a, b in SUMS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def completion(text, finish="stop", tokens=0, **message):
    message = {"role": "assistant", "content": text, **message}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    body |= {"usage": {"completion_tokens": tokens}} if tokens else {}
    return json.dumps(body).encode()


def teacher(tally=None):
    """Returns a teacher whose answers to a sum are right, wrong, longer, and cut off, in turn."""
    counts = tally if tally is not None else {}

    def answer(number, body):
        question = body["messages"][-1]["content"]
        a, b = (int(x) for x in question.rstrip("?").split(" + "))
        counts[question] = counts.get(question, 0) + 1
        right = f"<answer>{a + b}</answer>"
        return [
            completion(f"I add {a} and {b}. It is {right}", tokens=20),
            completion(f"<answer>{a - b}</answer>", tokens=5),
            completion(f"So {right}", tokens=9, reasoning_content=f"{a} and {b} more"),
            completion(right, "length", tokens=30),
        ][(counts[question] - 1) % 4]

    return answer


def settings(prompts, at, **changed):
    # one request at a time, so that the answers to a question keep their order
    usual = {"reward": "exact", "endpoint": at, "samples": 4, "requests": 1, "timeout_s": 20.0}
    usual["heldout_frac"] = 0.0
    return DistilConfig((prompts,), "teacher", **{**usual, **changed})


def kept_in(folder):
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def test_right_answers_are_kept_with_their_thoughts_and_counted(prompts, tmp_path):
    with served(teacher()) as (at, seen):
        config = settings(prompts, at, system_prompt="Add.", max_tokens=64)
        report = distil(config, str(tmp_path / "out"), print)
    rows = kept_in(tmp_path / "out")
    assert [row["messages"] for row in rows] == [
        [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"{a} + {b}?"},
            {
                "role": "assistant",
                "content": f"<think>\n{a} and {b} more\n</think>\n\nSo <answer>{a + b}</answer>",
            },
        ]
        for a, b in SUMS
    ]
    assert [(row["answer"], row["tokens"], row["sample"]) for row in rows] == [
        ("5", 9, 2),
        ("9", 9, 2),
        ("2", 9, 2),
    ]
    expected = {"prompts": 3, "solved": 3, "answers": 12, "right": 6, "unknown": 0, "cut": 3}
    expected |= {"kept": 3, "tokens": 3 * 64, "kept_tokens": 27}
    expected |= {"pass_rate": 0.5, "tokens_a_kept_answer": 64.0}
    assert report["labels"] == {"sums": expected} and report["failures"] == {}
    assert {name: report[name] for name in expected} == expected
    saved_report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {name: saved_report[name] for name in expected} == expected
    assert seen.requests[0]["temperature"] == 1.0 and seen.requests[0]["max_tokens"] == 64


def test_held_out_questions_are_not_distilled(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    sums = [(a, b) for a in range(1, 6) for b in range(6)]
    for name, some in (("train", sums), ("test", [(9, 9), (1, 0)])):
        rows = [{"prompt": f"{a} + {b}?", "answer": str(a + b)} for a, b in some]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines: list[str] = []
    whole, alone = str(folder), str(folder / "train.jsonl")

    def asked(at, seen, data, out, **changed):
        before = len(seen.requests)
        distil(settings(data, at, samples=1, **changed), str(tmp_path / out), lines.append)
        return {one["messages"][-1]["content"] for one in seen.requests[before:]}

    with served(teacher()) as (at, seen):
        by_name = asked(at, seen, whole, "by_name")
        usual = DataConfig.heldout_frac
        by_hash = asked(at, seen, alone, "by_hash", heldout_frac=usual)
        assert asked(at, seen, alone, "by_hash", heldout_frac=0.0).isdisjoint(by_hash)
    every = {f"{a} + {b}?" for a, b in sums}
    assert by_name == every - {"1 + 0?"}
    run = DataConfig(sources=(FileSource(alone),))
    assert by_hash == {one.text for one in questions(run, 7, print) if not one.heldout} != every
    assert "2 of 31 questions are held out for evaluation and are not distilled" in "".join(lines)
    assert f"{30 - len(by_hash)} of 30 questions are held out" in "".join(lines)
    with pytest.raises(
        DataError, match=r"no question is left to distil: distil.heldout_frac = 0.9"
    ):
        distil(settings(alone, "http://h/v1", heldout_frac=0.9999), str(tmp_path / "none"), print)


def test_sft_reads_what_is_written(prompts, tmp_path):
    with served(teacher()) as (at, _):
        distil(settings(prompts, at), str(tmp_path / "out"), print)
    config = RunConfig(
        "sft", tiny_run().model, sft=SFTConfig(files=(str(tmp_path / "out" / "train.jsonl"),))
    )
    examples = list(conversations(config.sft, config.data.system_prompt, print))
    assert len(examples) == 3 and examples[0].messages[-1]["content"].startswith("<think>")


def test_only_what_is_missing_is_asked_again(prompts, tmp_path, capsys):
    answers = teacher()
    failing = lambda n, body: (404, b"moved") if n == 4 else answers(n, body)  # noqa: E731
    out = str(tmp_path / "out")
    with served(failing) as (at, seen):
        report = distil(settings(prompts, at, samples=2), out, print)
        lost = sum(report["failures"].values())
        assert lost == 1 and report["answers"] == 5
        before = len(seen.requests)
        with (tmp_path / "out" / "answers.jsonl").open("a") as file:
            file.write('{"id": 1, "sam')  # an incomplete line, as after a kill
        report = distil(settings(prompts, at, samples=2), out, print)
        assert len(seen.requests) - before == lost and report["answers"] == 6
        train_bytes = (tmp_path / "out" / "train.jsonl").read_bytes()
        distil(settings(prompts, at, samples=2), out, print)
        assert len(seen.requests) - before == lost
        assert (tmp_path / "out" / "train.jsonl").read_bytes() == train_bytes
        more = distil(
            settings(prompts, at, samples=4, keep=9), out, print
        )  # a higher number continues the run
        assert (more["answers"], len(seen.requests) - before) == (12, lost + 6)
        assert [row["sample"] for row in kept_in(tmp_path / "out")].count(0) >= 2
        with pytest.raises(ConfigError, match=r"begun with temperature = 1.0, and now it is 0.5"):
            distil(settings(prompts, at, temperature=0.5), out, print)


@pytest.mark.parametrize("samples, requests", [(2, 1), (20, 8)])
def test_a_prompt_that_is_refused_ends_no_command(samples, requests, prompts, tmp_path):
    answers, lines = teacher(), []
    refused = f"{SUMS[0][0]} + {SUMS[0][1]}?"

    def failing(n, body):
        asked = body["messages"][-1]["content"]
        return (400, b"too long") if asked == refused else answers(n, body)

    with served(failing) as (at, seen):
        for _ in range(2):
            before = len(seen.requests)
            config = settings(prompts, at, samples=samples, requests=requests)
            report = distil(config, str(tmp_path / "out"), lines.append)
            entry = {"place": f"{prompts}, line 1", "detail": "HTTP 400: too long"}
            assert report["refused_prompts"] == [entry]
            asked = [one["messages"][-1]["content"] for one in seen.requests[before:]]
            assert asked.count(refused) == report["failures"]["refused"] <= 2 * requests
            assert report["answers"] == 2 * samples
        assert set(asked) == {refused}
    assert any("refused 1 prompts" in one and "HTTP 400: too long" in one for one in lines)


def test_a_teacher_that_refuses_every_prompt_ends_it(prompts, tmp_path):
    with served(lambda n, body: (400, b"no temperature, please")) as (at, seen):
        with pytest.raises(TeacherError, match=r"3 times in a row.*no temperature.*correct the se"):
            distil(settings(prompts, at), str(tmp_path / "out"), print)
        assert len(seen.requests) <= 6


TOOL = {"type": "function", "function": {"name": "add", "description": "adds numbers " * 9}}


def test_the_teacher_sees_the_tools_of_a_row(tmp_path):
    path = tmp_path / "calls.jsonl"
    row = {"prompt": "Add 2.", "answer": [{"name": "add", "arguments": {"x": 2}}], "tools": [TOOL]}
    path.write_text(json.dumps(row) + "\n")
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}
    with served(lambda n, body: completion(None, tool_calls=[call])) as (at, seen):
        config = settings(str(path), at, reward="tools", samples=1)
        report = distil(config, str(tmp_path / "out"), print)
    assert seen.requests[0]["tools"] == [TOOL] and report["right"] == 1
    (kept,) = kept_in(tmp_path / "out")
    assert kept["tools"] == [TOOL] and kept["messages"][-1]["content"].startswith("<tool_call>")


def test_the_engines_buckets_count_the_tools(tmp_path):
    a_model_that_ends(tmp_path)
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    chats = [[{"role": "user", "content": "1 + 1 ="}]]
    bare, with_tools = (
        engine_config(str(tmp_path), chats, 8, tools).rollout.prompt_buckets[-1]
        for tools in (None, [[{"name": "add"}]])
    )
    tokens = Tokenizer.load(str(tmp_path)).encode_chat(chats[0], tools=[{"name": "add"}])
    assert bare < len(tokens) <= with_tools


TASK = """
from compass_jax.rewards.tasks import Task

def prompts(seed):
    return [{"prompt": f"{n} + 1?", "sum": n + 1} for n in range(2)]

def score(response, sum):
    return float(response.endswith(str(sum)))

task = Task(prompts, score)
"""


def test_a_task_of_ones_own_judges_its_answers(tmp_path):
    (tmp_path / "sums.py").write_text(TASK)
    with served(lambda n, body: completion("It is 1")) as (at, _):
        report = distil(settings(f"{tmp_path}/sums.py:task", at), str(tmp_path / "out"), print)
    (row,) = kept_in(tmp_path / "out")
    assert row["messages"][0]["content"] == "0 + 1?" and row["label"] == "task"
    assert (report["solved"], report["right"], report["kept"]) == (1, 4, 1)


def test_a_teacher_that_refuses_or_is_not_there_ends_it(prompts, tmp_path, monkeypatch):
    with served(lambda n, body: (404, b"no such model")) as (at, seen):
        with pytest.raises(TeacherError, match=r"refused: HTTP 404: no such model; the same"):
            distil(settings(prompts, at), str(tmp_path / "out"), print)
        assert len(seen.requests) == 12  # one for each sample
    monkeypatch.setattr(module, "HOPELESS", 3)
    config = settings(prompts, "http://127.0.0.1:9/v1", timeout_s=0.2, temperature=0.5)
    with pytest.raises(
        TeacherError, match=r"no answer 3 times in a row, the last time (late|unre)"
    ):
        distil(config, str(tmp_path / "out"), print)


def answer(sample, text, tokens=1, reward=1.0, **changed):
    usual = {"thought": "", "complete": True, "known": True, "outcome": "ok"}
    return Answer(7, sample, text, tokens=tokens, reward=reward, **{**usual, **changed})


def test_the_shortest_or_random_ones_are_chosen_and_no_text_twice(prompts):
    answers = [
        answer(0, "long", 9),
        answer(1, "wrong", 1, 0.0),
        answer(2, "mid", 5),
        answer(3, "mid", 5),
        answer(4, "unknown", 1, known=False),
        answer(5, "cut", 1, complete=False),
        answer(6, "unsaid", 0),
        answer(7, "un", 0),
        answer(8, "mid", 5, thought="hm"),
    ]

    def samples(**changed):
        return [x.sample for x in chosen(answers, settings(prompts, "http://h/v1", **changed))]

    assert samples(keep=4) == [7, 6, 2, 8]
    assert samples(keep=99) == [7, 6, 2, 8, 0]
    drawn = [samples(keep=2, choose="random", seed=seed) for seed in range(60)]
    assert drawn[0] == samples(keep=2, choose="random", seed=0)
    counts = [sum(sample in one for one in drawn) for sample in (0, 2, 6, 7, 8)]
    assert all(len(set(one)) == 2 for one in drawn) and min(counts) > 10 and sum(counts) == 120
    assert chosen([answer(1, "wrong", 1, 0.0)], settings(prompts, "http://h/v1")) == []


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("Hm.\n</think>\n\n  4", "", "<think>\nHm.\n</think>\n\n  4"),
        ("<think>\nHm.</think>4", "", "<think>\nHm.</think>4"),
        ("\n\n4", "\nHm.\n\n", "<think>\nHm.\n</think>\n\n4"),
        ("4", "", "4"),
    ],
)
def test_a_thought_is_complete_whatever_the_teacher_leaves_out(text, thought, content):
    """A prompt may open the thought, and a parser of thoughts may leave blank lines."""
    assert answer(0, text, 1, thought=thought).content == content


def test_nothing_right_is_an_error(prompts, tmp_path):
    with (
        served(lambda n, body: completion("I do not know")) as (at, _),
        pytest.raises(DataError, match="none of 3 answers is right"),
    ):
        distil(settings(prompts, at, samples=1), str(tmp_path / "out"), print)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["pass_rate"] == 0.0


def test_a_damaged_line_and_a_folder_in_use_are_named(prompts, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    config = settings(prompts, "http://127.0.0.1:9/v1")
    (out / "answers.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(DataError, match=r"answers.jsonl, line 1: not a line of compass distil"):
        distil(config, str(out), print)
    with FolderLock(out), pytest.raises(RunDirectoryInUse, match="is in use by"):
        distil(config, str(out), print)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--endpoint", "nowhere"], "distil.endpoint = 'nowhere': must be an address"),
        (["--endpoint", "http://h/v1", "--key-env", "sk-1"], "distil.key_env must be the name"),
        (["--temperature", "0"], "4 samples of a prompt would be the same answer"),
        (["--reward", "judge"], "distil.reward = 'judge': a verifier that says right or wrong"),
        (["--data", f"{shop.__file__}:short_1"], "names a task of several turns"),
        (["--model", "no/folder"], "--model no/folder: there is no such folder"),
    ],
)
def test_settings_that_cannot_be_used_are_named(words, message, prompts, tmp_path, capsys):
    data = [] if "--data" in words else ["--data", prompts]
    command = ["distil", *data, "--out", str(tmp_path / "out")]
    words = words if "--model" in words else [*words, "--model", "m"]
    assert main([*command, *words, "--compilation-cache", "off"]) == 2
    assert message in capsys.readouterr().err


EVEN = """
def even(response, answer):
    return float(len(response) % 2 == 0)
"""


def a_model_that_ends(folder):
    """Writes random weights that sample the end token once in a few tokens."""
    model = tiny_run().model
    params = random_params(model)
    params["head"] = params["head"].at[:, 2].multiply(25.0)
    save_params(params, model, folder, "float32", tokenizer_from=TOKENIZER)


def test_our_own_engine_draws_the_same_answers_after_a_stop(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    a_model_that_ends(tmp_path / "model")
    (tmp_path / "own.py").write_text(EVEN)
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engines = []  # the second command reuses the first one's engine: compiling takes longest
    decoder_of = evaluate.decoder_of
    monkeypatch.setattr(
        evaluate,
        "decoder_of",
        lambda *arguments: (
            engines[0] if engines else engines.append(decoder_of(*arguments)) or engines[0]
        ),
    )
    command = ["distil", "--data", "sums.jsonl", "--model", "model", "--reward", "own.py:even"]
    command += ["--samples", "6", "--keep", "2", "--max-tokens", "8", "--heldout-frac", "0"]
    command += ["--compilation-cache", "off", "--out"]
    assert main([*command, "whole"]) == 0
    output = capsys.readouterr().out
    assert "24 of 24 answers are to be drawn" in output and "│ all" in output
    lines = (tmp_path / "whole" / "answers.jsonl").read_text().splitlines(keepends=True)
    answers = [json.loads(line) for line in lines]
    assert len(lines) == 24 and len({one["text"] for one in answers}) > 6
    assert {one["complete"] for one in answers} == {True, False}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "settings.json").write_bytes(
        (tmp_path / "whole" / "settings.json").read_bytes()
    )
    (tmp_path / "half" / "answers.jsonl").write_text("".join(lines[5:14]) + lines[0][:30])
    assert main([*command, "half"]) == 0
    assert "15 of 24 answers are to be drawn" in capsys.readouterr().out
    for name in ("train.jsonl", "report.json"):
        assert (tmp_path / "half" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    kept_rows = kept_in(tmp_path / "whole")
    right = [one for one in answers if one["complete"] and len(one["text"]) % 2 == 0]
    assert [one["reward"] for one in answers] == [1.0 - len(one["text"]) % 2 for one in answers]
    assert 0 < len(kept_rows) <= len(right)
