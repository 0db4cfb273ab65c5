"""The page in a real browser: it opens from disk, filters, sorts, colours, shows numbers on hover,
compares runs, and logs nothing to the console, whatever the run has logged."""

import json

import pytest
from logs import ATTACK, write_episodes, write_full_run, write_run

from benchmarks.browser import NAMES, Browser, find_browser
from benchmarks.report_page import synthetic_run
from compass_jax.runs.metric_table import METRICS
from compass_jax.runs.report.command import write_page
from compass_jax.runs.report.metrics import read_stages

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(NAMES)} is on PATH"
)


def page_of(*folders):
    return write_page({folder: read_stages(folder / "metrics.jsonl") for folder in folders})


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture
def page(browser, tmp_path):
    """Opens the page of one run; checks at the end that the console is empty."""
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page_of(write_run(tmp_path)))
    yield browser
    assert browser.errors == []


def count(browser, selector):
    return browser.evaluate(f"document.querySelectorAll({selector!r}).length")


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


def test_it_opens_from_disk_and_asks_for_nothing(page):
    (only,) = page.requests
    assert only.startswith("file://")
    assert count(page, "figure.chart svg") == 5
    assert "Step 6; 2,100 tokens generated" in text(page, ".top")
    assert "50%" in text(page, "#waste") and "1,050" in text(page, "#waste")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_text_of_a_run_is_shown_and_never_run(page):
    page.choose("#kind", "all rewards")
    page.choose("#order", "label")
    page.click(".item")
    assert text(page, "pre.text") == ATTACK
    assert text(page, ".group header b") == ATTACK
    assert page.evaluate("document.title").startswith("compass: ")
    assert count(page, "img") == 0 and count(page, "script") == 2


def test_the_policy_of_the_page_runs_no_other_script_and_fetches_nothing(browser, tmp_path):
    """The policy protects the reader even if a text of a run became an element."""
    browser.open(page_of(write_run(tmp_path)))
    browser.errors.clear()
    title = browser.evaluate("document.title")
    add = "document.body.append(Object.assign(document.createElement('{}'), {{{}}}))"
    browser.evaluate(add.format("script", "textContent: 'document.title = 1'"))
    browser.evaluate(add.format("img", "src: 'http://127.0.0.1:9/x.png'"))
    browser.wait("document.images.length === 1")
    assert browser.evaluate("document.title") == title
    refused = [error for error in browser.errors if "Content Security Policy" in error]
    assert len(refused) == 2 and "script-src" in refused[0] and "img-src" in refused[1]


def test_an_episode_is_shown_turn_by_turn(browser, tmp_path):
    browser.errors.clear()
    browser.open(page_of(write_episodes(tmp_path)))
    browser.choose("#kind", "with tool errors")
    turns = browser.evaluate(
        "[...document.querySelectorAll('.card:first-child .turn')].map((x) =>"
        " [x.classList.contains('given'), x.querySelector('.facts').innerText,"
        " x.querySelector('pre').innerText, x.querySelector('.fault')?.innerText ?? ''])"
    )
    assert turns[0] == [True, "given · 15 tokens · 0.25 s", "user\nHow much?\n", ""]
    attack = f"call {ATTACK}\U0001f600"
    assert turns[1] == [False, f"model, turn 1 · {len(attack)} tokens · 1.5 s", attack, ""]
    assert turns[2][2:] == ['{"error": "price: no tea"}', "tool error: price: no tea"]
    assert turns[3] == [False, "model, turn 2 · 8 tokens · 12 s", "It is 3.", ""]
    facts = text(browser, ".facts.episode")
    assert facts == (
        "2 turns · branch 2 of 3 · 9 tokens in other branches · model 13.5 s · environment 0.5 s"
        " · ended: all turns were used"
    )
    card = text(browser, ".card:first-child")
    assert "price 0.5 · manners 0.25" in card and "reward 0.75" in card
    lost = text(browser, ".card:nth-child(2)")
    assert "no verdict" in lost and "the shop is closed" in lost
    # the numbers of tokens are those of the whole response
    browser.hover(".turn:nth-child(4) .t")
    first = sum(len(x) for x in (turns[0][2], attack, turns[2][2])) + 1
    assert f"token {first} of" in text(browser, "#tip")
    browser.type("#search", "no tea")
    browser.wait("document.querySelectorAll('.item').length === 1")
    assert "Turns of an episode" in text(browser, "#curves")
    assert browser.errors == [] and count(browser, "img") == 0


def test_the_list_opens_with_the_groups_whose_rewards_vary(page, tmp_path):
    assert page.evaluate("document.getElementById('kind').value") == "rewards vary"
    assert count(page, ".item") == 6 and "6 of 12 groups" in text(page, "#groups")
    rewards = "[...document.querySelectorAll('.reward')].map((x) => x.innerText)"
    assert set(page.evaluate(rewards)) == {"reward 0", "reward 1"}  # of the group that is shown
    log = tmp_path / "rollouts.jsonl"
    log.write_text(log.read_text().replace('"reward": 1.0', '"reward": 0.0'))
    page.open(page_of(tmp_path))  # no group varies: all are shown
    assert page.evaluate("document.getElementById('kind').value") == "all rewards"
    assert count(page, ".item") == 12


def test_groups_are_found_by_text_label_reward_and_step(page):
    page.choose("#kind", "all rewards")
    assert count(page, ".item") == 12
    page.type("#search", "STEP 3")
    page.wait("document.querySelectorAll('.item').length === 2")
    page.evaluate("document.getElementById('search').value = ''")
    page.choose("#label", "easy")
    assert count(page, ".item") == 6
    page.choose("#label", "")
    page.choose("#kind", "rewards equal")
    assert count(page, ".item") == 6 and "onerror" in text(page, ".item")
    page.choose("#kind", "all rewards")
    page.choose("#order", "highest variance")
    assert "easy" in text(page, ".item")
    page.choose("#order", "oldest step")
    assert "step 1" in text(page, ".item")
    page.click("#only")
    page.choose("#step", "3")
    assert count(page, ".item") == 2 and "2 of 12 groups of step 4" in text(page, "#groups")
    page.choose("#kind", "without verdict")
    assert count(page, ".item") == 0 and "No group is chosen" in text(page, "#groups")


def test_tokens_have_the_colour_of_a_value_and_tell_it_on_hover(page):
    page.choose("#label", "easy")
    assert page.evaluate("document.getElementById('colour').value") == "entropy"
    # The text has 20 characters, one of which is two UTF-16 units in the browser.
    assert count(page, ".card:first-child .t") == 20
    painted = "[...document.querySelectorAll('.t')].map((x) => x.style.backgroundColor)"
    assert len(set(page.evaluate(painted)[:20])) > 15
    page.hover(".t", 10)
    tooltip = text(page, "#tip.on")
    for part in ("token 11 of 20", "0.5 nats", "-0.5", "2.0e-4 nats", "p 0.905", "6"):
        assert part in tooltip, (part, tooltip)
    page.choose("#colour", "advantage")
    assert page.evaluate(painted)[0] == "rgba(213, 94, 0, 0.8)"
    assert count(page, "#colour option[value=ratio][disabled]") == 1
    page.hover("#groups h2")
    assert count(page, "#tip.on") == 0


def test_the_slider_and_a_click_into_a_curve_choose_the_step(page):
    page.choose("#step", "0")
    assert text(page, "#stepnow") == "step 1, reward 0.167"
    assert "reward 0.167" in text(page, "#curves .legend").replace("\n", " ")
    page.click("#curves svg")
    assert text(page, "#stepnow").startswith(("step 3", "step 4"))
    page.hover("#curves svg")
    assert "step" in text(page, "#tip.on")
    page.choose("#curves select", "entropy_nats")
    assert METRICS["entropy_nats"].text in text(page, "#curves .charts + label + .charts")


def test_groups_that_are_equal_and_neither_right_nor_wrong_have_a_curve(browser, tmp_path):
    log = write_run(tmp_path) / "metrics.jsonl"
    log.write_text(
        log.read_text().replace('"grad_norm"', '"groups/between_frac": 0.75, "grad_norm"')
    )
    browser.open(page_of(tmp_path))
    charts = "[...document.querySelectorAll('#curves figure.chart')].map((x) => x.innerText)"
    (chart,) = (x for x in browser.evaluate(charts) if "Groups by reward" in x)
    assert "between" in chart and "75%" in chart


def test_runs_are_compared_over_steps_and_over_tokens(browser, tmp_path):
    browser.errors.clear()
    runs = [write_run(tmp_path / name, steps) for name, steps in (("a", 3), ("b", 6))]
    browser.open(page_of(*runs))
    assert count(browser, "#compare figure") >= 5
    browser.choose("#by", "tokens")
    assert "At equal generated tokens: 600" in text(browser, "#compare")
    tables = "[...document.querySelectorAll('#compare table')]"
    cells = browser.evaluate(f"{tables}.map((x) => x.rows[1].innerText)")
    assert [cell.split("\t")[1:] for cell in cells] == [["1", "1"], ["1", "0.5"]]
    browser.choose("#run", "1")
    assert "Step 6" in text(browser, ".top") and count(browser, ".item") == 6
    assert browser.errors == []


def test_the_first_card_of_two_runs_has_both_held_out_curves(browser, tmp_path):
    browser.errors.clear()
    runs = [write_full_run(tmp_path / name, steps) for name, steps in (("a", 20), ("b", 40))]
    browser.open(page_of(*runs))
    assert titles(browser, "#accuracy") == ["Held-out accuracy"]
    assert count(browser, "#accuracy .band") == count(browser, "#accuracy path.line") == 2
    card = text(browser, "#accuracy")
    assert "a: 50% of" in card and "b: 50% of" in card
    assert card.count("before the first step") == 2
    names = "[...document.querySelectorAll('#accuracy .legend span span')].map((x) => x.innerText)"
    assert [name.split("/")[-1] for name in browser.evaluate(names)] == ["a: rl", "b: rl"] or [
        name.split("/")[-1] for name in browser.evaluate(names)
    ] == ["a", "b"]
    assert "Held-out accuracy" not in titles(browser, "#compare")
    for axis in ("tokens", "hours"):
        browser.choose("#axis", axis)
        assert count(browser, "#accuracy path.line") == 2
    assert browser.errors == []


def test_a_set_that_only_the_other_run_evaluated_keeps_its_own_card(browser, tmp_path):
    browser.errors.clear()
    write_full_run(tmp_path / "a")
    write_run(tmp_path / "b")
    browser.open(page_of(tmp_path / "a", tmp_path / "b"))
    assert "greedy answer" in text(browser, "#accuracy .legend")
    browser.choose("#run", "1")
    assert "has evaluated nothing yet" in text(browser, "#accuracy")
    assert browser.errors == []


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        (
            (0.5, 0.0, 0.0, 0.0),
            "50% of 2,100 generated tokens taught (by rewards that differ within a",
        ),
        (
            (0.25, 0.05, 0.2, 0.0),
            "50% of 2,100 generated tokens taught (by 25% rewards that differ",
        ),
        (
            (0.0, 0.0, 0.3, 0.0),
            "30% of 2,100 generated tokens taught (by entropy alone); 70% taught",
        ),
        ((0.0, 0.0, 0.0, 0.4), "40% of 2,100 generated tokens taught (by the prediction alone)"),
        ((0.0, 0.0, 0.0, 0.0), "None of 2,100 generated tokens taught."),
    ],
)
def test_a_sentence_says_which_share_of_the_tokens_taught(browser, tmp_path, shares, sentence):
    write_run(tmp_path)
    log, rows = tmp_path / "metrics.jsonl", []
    for line in log.read_text().splitlines():
        row = json.loads(line)
        for name, share in zip(
            ("verifier", "shaping", "entropy", "prediction"), shares, strict=True
        ):
            row["metrics"][f"waste/frac_{name}_signal"] = share
        row["metrics"]["waste/frac_none"] = 1 - sum(shares)
        rows.append(json.dumps(row) + "\n")
    log.write_text("".join(rows))
    browser.open(page_of(tmp_path))
    assert text(browser, "#accuracy .taught").startswith(sentence)


@pytest.mark.parametrize("missing", ["rollouts", "tokens"])
def test_what_was_not_logged_is_said(browser, tmp_path, missing):
    browser.errors.clear()
    write_run(tmp_path, tokens=missing == "rollouts")
    if missing == "rollouts":
        (tmp_path / "rollouts.jsonl").unlink()
    browser.open(page_of(tmp_path))
    if missing == "rollouts":
        assert "This run has logged no samples" in text(browser, "#groups")
    else:
        assert "no numbers of single tokens" in text(browser, "#mismatch")
        assert "(not logged)" in browser.evaluate("document.getElementById('colour').textContent")
    assert browser.errors == []


def test_a_run_of_sft_alone_has_its_curves(browser, tmp_path):
    browser.errors.clear()
    rows = [f'{{"stage": "sft", "step": {i}, "metrics": {{"sft/loss": {4 / i}}}}}' for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    browser.open(page_of(tmp_path))
    assert count(browser, "#curves figure") == 1
    assert "generates no tokens" in text(browser, "#waste")
    assert "samples nothing" in text(browser, "#groups")
    assert browser.errors == []


def test_a_large_run_opens_soon(browser, tmp_path):
    """It takes under 2 s on a quiet machine (docs/report.md); the limit allows for a busy one."""
    browser.errors.clear()
    synthetic_run(tmp_path)
    browser.open(page_of(tmp_path))
    assert int(browser.evaluate("document.documentElement.dataset.ready")) < 8000
    assert count(browser, ".item") == 40 and count(browser, "pre.text") == 16
    assert browser.errors == []


# ---- logs of the present version -----------------------------------------------------------------


@pytest.fixture
def full(browser, tmp_path):
    """Opens the page of a run that logs everything; checks at the end that the console is empty."""
    browser.errors.clear()
    browser.open(page_of(write_full_run(tmp_path)))
    yield browser
    assert browser.errors == []


def titles(browser, part):
    charts = f"[...document.querySelectorAll('{part} figcaption b')].map((x) => x.innerText)"
    return browser.evaluate(charts)


def test_the_first_card_is_the_held_out_accuracy_with_its_interval_and_start(full):
    first = full.evaluate("document.querySelector('section').id")
    assert first == "accuracy" and titles(full, "#accuracy") == ["Held-out accuracy"]
    assert count(full, "#accuracy .band") == 1
    card = text(full, "#accuracy")
    for part in ("30.0%", "26.0% to 34.0%", "65.0%", "+35 points", "bootstrap", "start 30%"):
        assert part in card.replace("\n", " "), part


def test_parts_labels_and_distributions_have_a_chart_each(full):
    labels = ["easy", "hard"]  # of the pass rates, then of the lengths
    first_titles = ["Reward", "Parts of the reward", *labels, *labels, "Rewards", "Lengths"]
    assert titles(full, "#curves")[:8] == first_titles
    charts = "[...document.querySelectorAll('#curves figure')].map((x) => x.innerText)"
    chart_texts = dict(zip(titles(full, "#curves"), full.evaluate(charts), strict=True))
    assert (
        "verifier" in chart_texts["Parts of the reward"]
        and "length" in chart_texts["Parts of the reward"]
    )
    headings = "[...document.querySelectorAll('.multiples .heading')].map((x) => x.innerText)"
    assert [x.split(" by ")[0] for x in full.evaluate(headings)] == ["Pass rate", "Response length"]
    ticks = "[...document.querySelectorAll('.multiples svg')].map((x) => [...x.querySelectorAll('.tick')].map((t) => t.textContent).join())"  # noqa: E501
    pass_rates, lengths = full.evaluate(ticks)[:2], full.evaluate(ticks)[2:]
    assert len(set(pass_rates)) == len(set(lengths)) == 1  # one scale for all labels
    readings = "[...document.querySelectorAll('.multiples .legend b')].map((x) => x.innerText)"
    full.choose("#step", "10")
    assert all(full.evaluate(readings))
    assert "3 values above the axis, up to 90" in chart_texts["Time of a step"]


def test_the_x_axis_is_steps_tokens_or_hours(full):
    labels = "document.querySelector('#curves svg').querySelectorAll('text')"
    ticks = f"[...{labels}].map((x) => x.textContent)"
    by_step = full.evaluate(ticks)
    assert "40" in by_step
    full.choose("#axis", "tokens")
    assert any(x.endswith(" k") for x in full.evaluate(ticks))
    full.choose("#step", "0")
    assert text(full, "#stepnow").startswith("step 1,")
    full.choose("#axis", "hours")
    assert "0.1" in full.evaluate(ticks) and text(full, "#stepnow").startswith("step 1,")
    full.click("#curves svg")  # a click into the middle: about half of the hours
    assert 15 < int(text(full, "#stepnow").split(",")[0].split()[1]) < 30


def test_answers_are_found_by_their_change_and_open(full):
    assert "40 of 40 prompts" in text(full, "#answers")
    full.choose("#change", "better at the end")
    assert "14 of 40 prompts" in text(full, "#answers")
    full.click(".asked summary")
    full.wait("document.querySelectorAll('.asked[open] .answer').length === 10")
    assert "greedy · reward 1" in text(full, ".asked")
    full.choose("#change", "worse at the end")
    assert "0 of 40 prompts" in text(full, "#answers")


def test_settings_are_searched_and_the_machine_is_named(full):
    table = text(full, "#settings")
    assert "rl.zero_variance.grow_to" in table and "evaluation.k" not in table
    assert "cores" in table
    full.click("#defaults")
    assert "evaluation.k" in text(full, "#settings")
    full.type("#setting", "optim")
    full.wait("document.querySelectorAll('#settings tr').length === 1")


def test_the_mismatch_of_the_page_has_every_logged_token(full):
    run = full.evaluate("JSON.parse(document.getElementById('data').textContent).runs[0]")
    values = [s["values"] for g in run["groups"] for s in g["samples"] if s.get("values")]
    logged = sum(len(x["text"]) for x in values)
    assert f"of {logged:,} logged tokens" in text(full, "#mismatch")


@pytest.mark.parametrize("width", [360, 500, 1280])
def test_nothing_is_scrolled_sideways(tmp_path, width):
    runs = [write_full_run(tmp_path / name) for name in ("a" * 40, "b")]
    over = (
        "[...document.querySelectorAll('body *')].filter((x) => x.id !== 'tip' &&"
        " (x.getBoundingClientRect().right > innerWidth + 1 ||"
        " (x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).overflowX === 'auto')))"
        ".map((x) => x.tagName + '.' + x.className)"
    )
    with Browser(width=width) as browser:
        browser.open(page_of(*runs))
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(over) == []
        assert browser.errors == []
