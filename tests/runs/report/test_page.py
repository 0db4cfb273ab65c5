"""The page: one file that loads nothing from elsewhere, and treats every text that a run logged as
data."""

import io
import json
import re
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest
from logs import ATTACK, write_full_run, write_run
from rich.console import Console

from benchmarks.report_page import synthetic_run
from compass_jax.commands import cli
from compass_jax.runs.report import ReportError
from compass_jax.runs.report.command import watch_report, write_page
from compass_jax.runs.report.embed import SCRIPTS, embedded, page
from compass_jax.runs.report.heldout import evaluation_answers
from compass_jax.runs.report.metrics import heat_map, hours, read_metrics, read_stages, thinned
from compass_jax.runs.rundir import FolderLock, is_locked


class Elements(HTMLParser):
    """The elements (tag, attributes, text) of a page, as a browser's parser reads them."""

    def __init__(self, text):
        super().__init__()
        self.found, self.comments = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])

    def handle_data(self, data):
        if self.found:
            self.found[-1][2] += data

    def handle_comment(self, data):
        self.comments.append(data)


def page_of(*folders):
    """Writes the page of runs; returns (path, text, data)."""
    path = write_page({folder: read_stages(folder / "metrics.jsonl") for folder in folders})
    text = path.read_text()
    data = next(x for x in Elements(text).found if x[1].get("id") == "data")
    return path, text, json.loads(data[2])


@pytest.fixture(scope="module")
def small_page(tmp_path_factory):
    return page_of(write_run(tmp_path_factory.mktemp("run")))


def test_the_page_asks_nothing_of_anybody(small_page):
    path, text, _ = small_page
    elements = Elements(text).found
    assert [x[0] for x in elements].count("script") == 2  # its data and its code
    assert not [x for x in elements if {"src", "href", "srcset", "style"} & set(x[1])]
    policy = next(x[1]["content"] for x in elements if "http-equiv" in x[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy
    code = text.replace("http://www.w3.org/2000/svg", "")
    assert "://" not in code.split('id="data">')[0] + code.split("</script>")[1]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        for name in SCRIPTS:
            file = resources.files("compass_jax.runs.report") / "web" / f"{name}.js"
            assert word not in file.read_text(), (word, name)
    assert path.name == "report.html" and path.stat().st_size < 200_000


@pytest.mark.parametrize(
    "shares, notice",
    [
        ([0, 0, 0, 0], ""),
        (
            [0, 0.25, None, 0.05],
            "in 2 of 4 steps samples have no verdict and are left out, at most"
            " 25.0% of a step's and 10.0% in the mean (reward/unknown_frac)",
        ),
    ],
)
def test_samples_without_a_verdict_are_told_below_the_table(tmp_path, capsys, shares, notice):
    folder = write_run(tmp_path / "run", steps=4)
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line, share in zip(lines, shares, strict=True):
        line["metrics"]["reward/unknown_frac"] = share
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["report", str(folder)]) == 0
    notices = [x for x in capsys.readouterr().out.splitlines() if "have no verdict" in x]
    assert notices == ([notice] if notice else [])


def test_text_of_a_run_stays_text(small_page):
    _, text, data = small_page
    parsed = Elements(text)
    assert not parsed.comments and "img" not in [x[0] for x in parsed.found]
    hostile = data["runs"][0]["groups"][1]
    assert hostile["label"] == hostile["samples"][0]["response"] == ATTACK
    assert "<" not in embedded({"<!--": ["</script>", "<script>"]})
    html = page("</title><script>1</script>", {}).decode()
    assert "<title>&lt;/title&gt;&lt;script&gt;1&lt;/script&gt;</title>" in html


def test_every_text_and_number_of_the_logs_is_on_the_page(small_page):
    run = small_page[2]["runs"][0]
    assert run["logged"] == len(run["groups"]) == 12 and run["last"] == 6
    assert run["curves"]["metrics"]["reward/mean"]["v"] == [
        0.16667,
        0.33333,
        0.5,
        0.66667,
        0.83333,
        1,
    ]
    assert run["curves"]["metrics"]["grad_norm"] == {"v": [1, None, 1, 1, 1, 1], "bad": 1}
    assert run["tokens"] == [100, 300, 600, 1000, 1500, 2100]
    assert run["funnel"]["verifier"] == run["funnel"]["silent"] == 1050
    sample = run["groups"][0]["samples"][0]
    assert sample["response"] == "<answer>1\u00e9\U0001f600</answer>"
    assert sample["components"] == {"format": 1} and sample["means"] == {"advantage": 0.5}
    assert sample["values"]["advantage"] == -0.5 and len(sample["values"]["text"]) == 20
    assert "values" not in run["groups"][0]["samples"][1]


def test_many_steps_are_thinned_to_means(tmp_path):
    rows = [
        {"stage": "rl", "step": s, "metrics": {"x": float(s), "odd": None if s % 2 else 1.0}}
        for s in range(1, 102)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = thinned(read_metrics(tmp_path / "metrics.jsonl"), 50)
    assert curves["every"] == 3 and curves["steps"][:2] == [3, 6] and curves["steps"][-1] == 101
    expected = [np.mean(range(a, min(a + 3, 102))) for a in range(1, 102, 3)]
    assert curves["metrics"]["x"]["v"] == expected
    assert curves["metrics"]["odd"]["bad"] == 51 and set(curves["metrics"]["odd"]["v"]) == {1}


def test_several_runs_share_a_page_and_have_names_of_their_own(tmp_path):
    runs = [write_run(tmp_path / name / "rl", steps) for name, steps in (("a", 3), ("b", 5))]
    path, _, data = page_of(*runs)
    assert path == runs[0] / "report_compared.html"
    assert [run["name"] for run in data["runs"]] == ["a/rl", "b/rl"]
    assert [run["last"] for run in data["runs"]] == [3, 5]
    assert [run["path"] for run in data["runs"]] == [str(run) for run in runs]


# ---- incomplete and damaged runs -----------------------------------------------------------------


def test_a_run_that_goes_on_or_was_killed_in_a_line_says_so(tmp_path):
    write_run(tmp_path)
    (tmp_path / "config.json").write_text('{"rl": {"steps": 60}, "model": {"family": "qwen3"}}')
    for name in ("metrics", "rollouts", "tokens"):
        with open(tmp_path / f"{name}.jsonl", "a") as file:
            file.write('{"stage": "rl", "step": 7, "met')
    run = page_of(tmp_path)[2]["runs"][0]
    assert (run["last"], run["wanted"], run["logged"]) == (6, 60, 12)
    assert ["model", "qwen3"] in run["facts"]
    cut = [note for note in run["notes"] if "has no end" in note]
    assert [note.split()[4] for note in cut] == ["metrics.jsonl", "rollouts.jsonl", "tokens.jsonl"]


def test_the_last_evaluation_of_an_earlier_version_is_a_point_unless_it_cannot_be_read(tmp_path):
    write_run(tmp_path)
    scores = {"avg_at_k": 0.25, "greedy": 0.5, "reward": 0.375}
    metrics = {f"eval/heldout/{name}": value for name, value in scores.items()}
    absent = dict.fromkeys(("avg_at_k_low", "avg_at_k_high", "pass_at_k"))
    for text, points in (
        (json.dumps({"step": 6, "metrics": metrics}), [{"step": 6, **absent, **scores}]),
        ('{"step": 6, "met', []),
    ):
        (tmp_path / "evaluation.json").write_text(text)
        heldout = page_of(tmp_path)[2]["runs"][0]["heldout"]
        assert [x for one in heldout.values() for x in one["points"]] == points


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return page_of(write_full_run(tmp_path_factory.mktemp("full")))[2]["runs"][0]


def test_accuracies_have_their_start_their_intervals_and_their_labels(full):
    one = full["heldout"]["heldout"]
    assert [x["step"] for x in one["points"]] == [0, 10, 20, 30, 40]
    assert (one["k"], one["prompts"]) == (4, 40)
    first, last = one["points"][0], one["points"][-1]
    assert (first["avg_at_k"], first["avg_at_k_low"], first["avg_at_k_high"]) == (0.3, 0.26, 0.34)
    assert (last["avg_at_k"], last["pass_at_k"], last["greedy"]) == (0.65, 0.85, 0.7)
    assert one["by"]["easy"] == [20, 0.3, 0.65, [0.61, 0.69]]


def test_answers_of_start_and_end_stand_beside_each_other(full):
    assert full["answered"] == len(full["answers"]) == 40
    row = next(x for x in full["answers"] if x["answer"] == "20")
    assert (row["set"], row["label"], row["prompt"]) == ("heldout", "easy", "What is 20 + 0?")
    rewards = [[x["reward"] for x in row[when]] for when in ("start", "end")]
    assert rewards == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


def test_answers_take_their_share_of_the_page_and_no_more(tmp_path):
    for name in ("evaluation_start", "evaluation"):
        (tmp_path / name).mkdir()
        sample = {"response": "x" * 900, "reward": 0, "outcome": "ok", "tokens": 3}
        rows = [
            {"set": "a", "id": i, "prompt": str(i), "label": "", "samples": [sample] * 2}
            for i in range(100)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "answers.jsonl").write_text(text)
    chosen, count = evaluation_answers(tmp_path, 50_000)
    assert count == 100 and 5 < len(chosen) < 15
    assert [chosen[0]["prompt"], chosen[-1]["prompt"]] == ["0", "99"]
    (tmp_path / "evaluation" / "answers.jsonl").write_text('{"set": 1}\n')
    with pytest.raises(ReportError, match=r"evaluation/answers\.jsonl, line 1: it is damaged"):
        evaluation_answers(tmp_path, 50_000)


def test_every_setting_is_on_the_page_and_those_that_were_changed_are_marked(full):
    settings = {name: (value, changed) for name, value, changed in full["settings"]}
    assert settings["rl.optim.learning_rate"] == ("0.0003", True)
    assert settings["evaluation.k"] == ("4", False)  # the default
    assert settings["model.moe.experts"] == ("8", False)  # it has no default
    assert full["machine"] == [["device", "cpu"], ["cores", "2"], ["jax", "0.7.0"]]


def test_hours_are_sums_of_step_times_or_of_the_parts_of_an_earlier_version(full):
    assert full["hours"][0] == 0.025 and full["hours"] == sorted(full["hours"])
    steps = np.arange(1, 4)
    old = {"time/rollout_s": (steps, np.full(3, 1800.0)), "time/update_s": (steps, np.ones(3))}
    assert hours(old, [1, 3]) == [pytest.approx(0.50028), pytest.approx(1.5008)]
    assert hours({}, [1]) == []


def test_a_heat_map_holds_every_value_once(full):
    histogram = full["histograms"]["reward"]
    assert (histogram["low"], histogram["high"], histogram["steps"][-1]) == (0, 1, 40)
    assert all(sum(column) == pytest.approx(1) for column in histogram["cells"])
    assert histogram["cells"][-1][0] == pytest.approx(0.33) and histogram["cells"][-1][-1] == 0.67
    by_step = {step: [(0, 10, 1), (10, 20, 3)] for step in range(1, 101)}
    wide = heat_map(by_step, columns=10, rows=4)
    assert wide["steps"] == list(range(10, 101, 10))
    assert wide["cells"] == [[0.125, 0.125, 0.375, 0.375]] * 10
    one = heat_map({1: [(3, 3, 5)]}, rows=4)
    assert (one["low"], one["high"], one["cells"]) == (3, 3, [[1, 0, 0, 0]])
    assert heat_map({})["cells"] == []


# ---- a page that follows its run -----------------------------------------------------------------


def test_watch_rewrites_the_page_while_a_run_goes_on_and_ends_with_it(tmp_path):
    folder = tmp_path / "run"
    lock, console = FolderLock(folder), Console(width=200, file=io.StringIO())
    lock.__enter__()
    seen = []

    def sleep(seconds):
        assert seconds == 7
        page_file = folder / "report.html"
        seen.append('"again_s":7' in page_file.read_text() if page_file.exists() else None)
        if len(seen) == 3:
            lock.__exit__()
        else:
            write_run(folder, steps=len(seen))

    path = watch_report([folder], every_s=7, console=console, sleep=sleep)
    assert seen == [None, True, True]
    assert path == folder / "report.html"
    assert '"again_s":0' in path.read_text()  # the last page does not reload
    output = console.file.getvalue()
    assert "is not the directory of a run that has started" in output
    assert "step 1)" in output and "step 2)" in output
    assert "no process writes to the runs" in output


def test_watch_of_a_run_that_has_ended_writes_its_page_once(tmp_path, capsys):
    write_run(tmp_path)
    assert cli.main(["report", str(tmp_path), "--watch"]) == 0
    assert "this is the last page" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()
    assert cli.main(["report", str(tmp_path / "none"), "--watch"]) == 2


def test_looking_whether_a_folder_is_locked_hinders_nobody(tmp_path):
    assert not is_locked(tmp_path) and not (tmp_path / ".lock").exists()
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_run_without_samples_tokens_or_settings_still_has_a_page(tmp_path):
    write_run(tmp_path, tokens=False)
    assert page_of(tmp_path)[2]["runs"][0]["has_tokens"] is False
    (tmp_path / "rollouts.jsonl").unlink()
    (tmp_path / "config.json").write_text("[1")
    run = page_of(tmp_path)[2]["runs"][0]
    assert (run["groups"], run["logged"], run["facts"], run["wanted"]) == ([], 0, [], None)
    assert run["notes"][0] == "config.json cannot be read: the run's settings are not known."


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    write_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"stage": "rl", "step": 7, "metrics": {"reward/mean": NaN, "x": Infinity}}\n')
    text = (tmp_path / "rollouts.jsonl").read_text().replace('"reward": 1.0', '"reward": NaN')
    (tmp_path / "rollouts.jsonl").write_text(text)
    run = page_of(tmp_path)[2]["runs"][0]
    assert run["curves"]["metrics"]["reward/mean"]["v"][-1] is None
    assert run["groups"][0]["samples"][0]["reward"] is None
    assert "3 metrics have values that are not finite: gaps" in run["notes"][-1]


def test_half_a_character_does_not_break_the_page(tmp_path):
    write_run(tmp_path, 1)
    text = (tmp_path / "rollouts.jsonl").read_text().replace("step 1", "step \\ud800")
    (tmp_path / "rollouts.jsonl").write_text(text)
    assert page_of(tmp_path)[2]["runs"][0]["groups"][0]["prompt"].endswith("step ?")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"metrics.jsonl does not exist: .* is not the directory of a run that has started$"),
        ({"rl/metrics.jsonl": ""}, r"has started; it holds rl: name .*/rl$"),
        ({"metrics.jsonl": ""}, r"no step has been logged yet; wait for the first one"),
        ({"metrics.jsonl": '{"stage": "rl", "st'}, r"no step has been logged yet"),
        ({"metrics.jsonl": '{"step": 1}\n'}, r"metrics.jsonl, line 1: it is damaged"),
        ({"metrics.jsonl": "[" * 9999 + "\n"}, r"line 1: it is damaged"),
    ],
)
def test_where_nothing_can_be_shown_one_line_says_why(tmp_path, capsys, files, message):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cli.main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not list(tmp_path.glob("*.html"))


def test_the_page_goes_where_out_says_or_the_command_ends(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert str(tmp_path / "page.html") in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "page.html").stat().st_size > 10_000 and not (run / "report.html").exists()
    with pytest.raises(ReportError, match="No such file or directory; name another file with --o"):
        write_page({run: read_stages(run / "metrics.jsonl")}, str(tmp_path / "no" / "page.html"))


def test_a_large_run_stays_under_ten_megabytes(tmp_path):
    """There are 50 groups of 16 samples of 2,000 tokens, whose logs are larger than the page may
    be.
    """
    synthetic_run(tmp_path, logged=20_000)
    logs = sum((tmp_path / f"{name}.jsonl").stat().st_size for name in ("rollouts", "tokens"))
    assert logs > 15_000_000
    path, _, data = page_of(tmp_path)
    assert 7_000_000 < path.stat().st_size < 10_000_000
    run = data["runs"][0]
    assert len(run["groups"]) == run["logged"] == 50
    assert any("values" in s for g in run["groups"] for s in g["samples"])
