import subprocess
import sys

import numpy as np
import pytest

from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.base.records import stable_id
from compass_jax.config import DataConfig, ProceduralSource
from compass_jax.data import procedural
from compass_jax.data.files import DataError
from compass_jax.data.prompts import PromptTooLong, fitting, heldout_prompts, train_prompts
from compass_jax.data.questions import is_heldout, questions

EASY = ProceduralSource(
    "chain_sum",
    (("min_terms", 2), ("max_terms", 2), ("max_digits", 1)),
    size=150,
    label="easy",
    instruction="Work it out.",
)
HARD = ProceduralSource("chain_sum", (("min_terms", 3), ("max_terms", 4)), size=300, label="hard")
CONFIG = DataConfig(
    sources=(EASY, HARD), heldout_frac=0.25, eval_prompts=40, system_prompt="Be brief."
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(
        ["State the final answer to the following arithmetic problem: 1 + 2 ="] * 9,
        300,
        tmp_path_factory.mktemp("tokenizer"),
    )


def test_data_is_imported_without_jax():
    code = (
        "import sys; import compass_jax.data.prompts, compass_jax.data.sft,"
        " compass_jax.data.tokenizer, compass_jax.data.worked;print([m for m in ('jax', 'grain',"
        " 'reasoning_gym', 'math_verify') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_procedural_prompts_are_distinct_seeded_and_tokenised(tokenizer):
    prompts = train_prompts(CONFIG, tokenizer, seed=1)
    assert len({p.id for p in prompts}) == len(prompts)
    for label in ("easy", "hard"):
        texts = [p.question for p in prompts if p.label == label]
        assert len(set(texts)) == len(texts) > 80
    p = prompts[0]
    assert p.tokens.dtype == np.int32
    assert p.id == stable_id("easy\n" + p.question)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Work it out.\n" + p.question},
    ]
    assert p.tokens.tolist() == tokenizer.encode_chat(chat, add_generation_prompt=True)
    assert eval(p.question.split(": ")[1].rstrip(" =")) == int(p.answer)
    assert (prompts[-1].source, prompts[-1].label, prompts[-1].visit) == (1, "hard", 0)
    procedural.distinct_entries.cache_clear()
    assert [p.question for p in train_prompts(CONFIG, tokenizer, seed=1)] == [
        p.question for p in prompts
    ]
    assert [p.question for p in train_prompts(CONFIG, tokenizer, seed=2)] != [
        p.question for p in prompts
    ]


def test_splits_never_share_a_question_whatever_the_seed():
    train, heldout = set(), set()
    for seed in range(4):
        for question in questions(CONFIG, seed):
            (heldout if question.heldout else train).add(" ".join(question.text.split()))
    assert not train & heldout
    assert 0.18 < len(heldout) / len(heldout | train) < 0.32
    assert is_heldout("a  b\n", 0.5) == is_heldout("a b", 0.5)
    texts = [str(i) for i in range(500)]
    assert not any(is_heldout(t, 0.0) for t in texts)
    small = {t for t in texts if is_heldout(t, 0.1)}
    assert small < {t for t in texts if is_heldout(t, 0.3)}, (
        "raising the share keeps what was held out"
    )


def test_heldout_shares_are_proportional(tokenizer, caplog):
    pool = [q for q in questions(CONFIG, 0) if q.heldout]
    available = {label: sum(q.label == label for q in pool) for label in ("easy", "hard")}
    chosen_prompts = heldout_prompts(CONFIG, tokenizer, 0)
    assert len(chosen_prompts) == 40
    for label, count in available.items():
        chosen = [p.question for p in chosen_prompts if p.label == label]
        assert abs(len(chosen) - 40 * count / len(pool)) < 1
        of_label = [q.text for q in pool if q.label == label]
        assert chosen == [of_label[i * count // len(chosen)] for i in range(len(chosen))]
    usual, notices = DataConfig(sources=(EASY,), heldout_frac=0.25), []
    assert available["easy"] < usual.eval_prompts  # the default, so no notice is due
    assert len(heldout_prompts(usual, tokenizer, 0, notices.append)) == available["easy"]
    assert not notices
    many = DataConfig(sources=(EASY,), heldout_frac=0.25, eval_prompts=4000)
    assert len(heldout_prompts(many, tokenizer, 0)) == available["easy"]
    assert f"only {available['easy']} held-out prompts are available" in caplog.text
    with pytest.raises(DataError, match=r"no held-out prompts.*data\.heldout_frac"):
        heldout_prompts(DataConfig(sources=(EASY,), heldout_frac=0.0), tokenizer, 0)
    assert (
        heldout_prompts(DataConfig(sources=(EASY,), heldout_frac=0.0, eval_prompts=0), tokenizer, 0)
        == []
    )


def test_exhausted_dataset_gives_all_its_questions(caplog):
    source = ProceduralSource("count_bits", (("min_n", 1), ("max_n", 30)), size=500, label="bits")
    entries = procedural.distinct_entries(source, 3)
    assert sorted(entry["metadata"]["number"] for entry in entries) == list(range(1, 31))
    assert "bits has only 30 distinct questions" in caplog.text


def test_unknown_names_and_refused_options():
    with pytest.raises(DataError, match=r"no dataset 'chainsum'; did you mean .*chain_sum"):
        procedural.open_dataset("chainsum", {})
    with pytest.raises(DataError, match=r"chain_sum has no option 'terms'.*max_terms"):
        procedural.open_dataset("chain_sum", {"terms": 3})
    with pytest.raises(
        DataError, match=r"chain_sum refuses the options.*max_terms must be >= min_terms"
    ):
        procedural.open_dataset("chain_sum", {"min_terms": 5, "max_terms": 2})
    dataset = procedural.open_dataset("basic_arithmetic", {"operators": ("+",)}, seed=1, size=3)
    assert dataset.config.operators == ["+"]


def test_datasets_that_depend_on_the_hash_seed_need_a_fixed_one(monkeypatch):
    source = ProceduralSource("ransom_note", size=3)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(
        DataError, match=r"ransom_note depends on Python's hash seed.*PYTHONHASHSEED=0"
    ):
        procedural.distinct_entries(source, 0)


def test_ids_that_collide_are_bumped(monkeypatch, tokenizer):
    monkeypatch.setattr("compass_jax.data.questions.stable_id", lambda text: 2**32 - 1)
    ids = [question.id for question in questions(DataConfig(sources=(EASY,)), 0)]
    assert ids[:3] == [2**32 - 1, 0, 1] and len(set(ids)) == 150


def test_overlong_prompts_are_left_out_and_counted_or_refused(tokenizer):
    """One notice counts the prompts that are left out and names the longest. "refuse", and a bucket
    that is too small for every prompt, are errors that name the setting.
    """
    prompts = train_prompts(CONFIG, tokenizer, 0)
    lengths = sorted(len(p.tokens) for p in prompts)
    longest, most = max(prompts, key=lambda p: len(p.tokens)), lengths[-1]
    notices = []
    assert fitting(prompts, most, "refuse", notices.append) == prompts and not notices
    bucket = lengths[len(lengths) // 2]
    remaining = fitting(prompts, bucket, "drop", notices.append)
    assert remaining == [p for p in prompts if len(p.tokens) <= bucket] and len(remaining) > 50
    (line,) = notices
    count = len(prompts) - len(remaining)
    assert count > 20 and line.startswith(
        f"{count} of {len(prompts)} prompts are longer than rollout.prompt_buckets[-1] = {bucket}"
        f" tokens and are left out; the longest has {most} tokens (hard: {longest.question!r:.120}"
    )
    for limit, overlong, remedy in (
        (bucket, "refuse", f"to {most}, or set data.overlong to 'drop'$"),
        (1, "drop", f"to {most}$"),
    ):
        with pytest.raises(PromptTooLong, match=rf"Raise .* rollout\.prompt_buckets {remedy}"):
            fitting(prompts, limit, overlong, notices.append)
    assert len(notices) == 1
