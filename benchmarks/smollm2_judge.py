"""Experiment: SmolLM2-135M-Instruct as the judge of short English answers, compared with a scalar
head on the same model, both trained on the same preferences.

    python -m benchmarks.smollm2_judge [--out runs/smollm2_judge] [--seeds 0] [--only NAME ...]
        [--smoke]

The questions ask for facts that the pretrained model may know: opposites, past tenses, plurals,
young animals, capitals. An answer is right (worth 1), unsure (0.5) or wrong (0: the answer to
another question of the kind), each in several wordings; a verdict compares the worths of two
answers with different texts, so that a third of the pairs are ties. Held out are a quarter of the
facts, whose answers are in no training pair, so that a judge has to know them.

    untrained        the judge before any training
    judge            SFT of all weights on PAIRS pairs in both orders, once; the reasoning names the
                     right answer and what either answer is
    judge, 3 epochs  the same, three times over the pairs
    judge, rate 3e-4 the same as `judge`, at three times the learning rate
    judge, verdicts  as `judge`, without the reasoning
    scalar ...       a scalar reward model on the same pairs, with one and with three epochs

Agreement and ties are of HELD pairs on held-out facts, with 95% bootstrap intervals over the facts;
a scalar model's ties are differences of its rewards up to a threshold that is fitted to the
training pairs. `majority` is the share of the most frequent verdict. A line per finished run goes
to OUT/smollm2_judge.jsonl; at the end OUT/smollm2_judge.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import experiments, rl_runs
from compass_jax.apps.pipeline.agreement import RULINGS, judged, own_judge, report
from compass_jax.apps.pipeline.train_judge import Rated
from compass_jax.commands.configs import smollm2_135m_cpu
from compass_jax.config import RunConfig, apply
from compass_jax.data.pairs import split_pairs
from compass_jax.devices.allocator import tune_allocator
from compass_jax.rewards.judges.agreement import Agreement
from compass_jax.rewards.verifiers.judge import both_orders
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.from_files import judge_config
from compass_jax.training.scalar import ScalarModel, ScalarTrainer
from compass_jax.training.sft import run_sft
from compass_jax.weights.gguf_folder import import_gguf

NAME = "smollm2_judge"
PAIRS, HELD, BATCH = 480, 200, 16
HELD_FACTS = 0.25
PROMPT, REPLY = 168, 64  # tokens of a judge's question, and of its reply at most
EXAMPLE = 184  # tokens of a question with the reply that is taught
CHATS = (72, 96)  # tokens of a question with one answer
UNSURE = ("I am not sure.", "I do not know.", "It depends.", "Please look that up.")
WORTH = {"right": 1.0, "unsure": 0.5, "wrong": 0.0}
SHARES = ("agreement", "preference", "tie_recall", "tie_precision", "position_bias", "missing")


class Kind(NamedTuple):
    """Questions of a kind: the question, a whole sentence as its answer, and the facts."""

    question: str
    sentence: str
    facts: dict[str, str]


def facts(text: str) -> dict[str, str]:
    """Returns the facts of a line of "thing answer" pairs; an underscore is a space."""
    words = [word.replace("_", " ") for word in text.split()]
    return dict(zip(words[::2], words[1::2], strict=True))


KINDS = (
    Kind(
        "What is the opposite of {}?",
        "The opposite of {} is {}.",
        facts(
            "hot cold big small up down left right happy sad day night open closed fast slow"
            " early late young old light dark full empty hard soft high low strong weak rich poor"
            " wet dry long short near far first last win lose buy sell begin end true false"
            " inside outside love hate war peace front back loud quiet thick thin push pull"
            " above below clean dirty"
        ),
    ),
    Kind(
        "What is the past tense of {}?",
        "The past tense of {} is {}.",
        facts(
            "go went run ran eat ate see saw take took give gave come came write wrote sing sang"
            " drink drank swim swam begin began break broke speak spoke drive drove fly flew grow"
            " grew know knew throw threw find found think thought buy bought bring brought teach"
            " taught catch caught feel felt keep kept sleep slept leave left make made say said"
            " sell sold tell told hold held stand stood win won sit sat fall fell ride rode"
        ),
    ),
    Kind(
        "What is the plural of {}?",
        "The plural of {} is {}.",
        facts(
            "child children man men woman women foot feet tooth teeth mouse mice goose geese ox"
            " oxen person people leaf leaves knife knives wife wives wolf wolves city cities baby"
            " babies box boxes bus buses hero heroes potato potatoes dish dishes cat cats book"
            " books shelf shelves life lives"
        ),
    ),
    Kind(
        "What is a young {} called?",
        "A young {} is called a {}.",
        facts(
            "dog puppy cat kitten cow calf horse foal sheep lamb pig piglet goat kid chicken"
            " chick duck duckling goose gosling lion cub kangaroo joey deer fawn frog tadpole"
            " swan cygnet"
        ),
    ),
    Kind(
        "What is the capital of {}?",
        "The capital of {} is {}.",
        facts(
            "France Paris Germany Berlin Italy Rome Spain Madrid England London Japan Tokyo China"
            " Beijing Russia Moscow Egypt Cairo Greece Athens Portugal Lisbon Austria Vienna"
            " Poland Warsaw Sweden Stockholm Norway Oslo Denmark Copenhagen Finland Helsinki"
            " Ireland Dublin Hungary Budapest Turkey Ankara Canada Ottawa India New_Delhi Cuba"
            " Havana Peru Lima Chile Santiago Kenya Nairobi Iran Tehran Iraq Baghdad Thailand"
            " Bangkok Belgium Brussels"
        ),
    ),
)


class Question(NamedTuple):
    """A question about a fact. Wrong answers are `others`, which are right of other facts."""

    kind: Kind
    thing: str
    others: tuple[str, ...]

    @property
    def right(self) -> str:
        """The right answer, in one or two words."""
        return self.kind.facts[self.thing]

    def answer(self, worth: str, draw: random.Random) -> str:
        """Returns an answer of this worth, in one of its wordings."""
        if worth == "unsure":
            return draw.choice(UNSURE)
        word = self.right if worth == "right" else draw.choice(self.others)
        sentence = self.kind.sentence.format(self.thing, word)
        return draw.choice(
            (word, f"{word[0].upper()}{word[1:]}.", sentence, f"I think it is {word}.")
        )


def questions(facts: Sequence[tuple[Kind, str]]) -> list[Question]:
    """Returns a question about each fact, whose wrong answers are those of the other facts of its
    kind: so no answer to a held-out fact is in a training pair.
    """
    return [
        Question(
            kind,
            thing,
            tuple(kind.facts[other] for one, other in facts if one is kind and other != thing),
        )
        for kind, thing in facts
    ]


def pairs(pool: Sequence[Question], count: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Yields `count` preferences on answers to these questions in turn. Of a third the answers are
    of equal worth; no two texts are equal.
    """
    unequal = list(itertools.permutations(WORTH, 2))
    for one in itertools.islice(itertools.cycle(pool), count):
        tie = draw.random() < 1 / 3
        worths = (draw.choice(list(WORTH)),) * 2 if tie else draw.choice(unequal)
        texts = ["", ""]
        while texts[0] == texts[1]:
            texts = [one.answer(worth, draw) for worth in worths]
        first, second = (WORTH[worth] for worth in worths)
        yield {
            "prompt": one.kind.question.format(one.thing),
            "candidate": texts[0],
            "anchor": texts[1],
            "verdict": ("Worse", "Tie", "Better")[1 + (first > second) - (first < second)],
            "reasoning": f"Right is {one.right}: candidate {worths[0]}, anchor {worths[1]}.",
        }


class Variant(NamedTuple):
    """How a judge or a scalar model is trained; rate 0: not at all."""

    rate: float = 1e-4
    epochs: int = 1
    scalar: bool = False
    reasons: bool = True


VARIANTS = {
    "untrained": Variant(0.0),
    "judge": Variant(),
    "judge, 3 epochs": Variant(epochs=3),
    "judge, rate 3e-4": Variant(3e-4),
    "judge, verdicts": Variant(reasons=False),
    "scalar, 1 epoch": Variant(scalar=True),
    "scalar, 3 epochs": Variant(epochs=3, scalar=True),
}


class Trial:
    """The data of a seed in one folder, and the runs on it."""

    def __init__(self, seed: int, out: Path, smoke: bool):
        self.seed, self.folder, self.smoke = seed, out / f"seed{seed}", smoke
        self.model = str(out / "model")
        if not Path(self.model).exists():
            imported = smollm2_135m_cpu.pipeline().stages[0]
            import_gguf(imported.settings["file"], self.model)
        draw = random.Random(f"{seed} {NAME}")
        all_facts = [(kind, thing) for kind in KINDS for thing in kind.facts]
        draw.shuffle(all_facts)
        count = round(HELD_FACTS * len(all_facts))
        held_questions, known_facts = questions(all_facts[:count]), questions(all_facts[count:])
        training = list(pairs(known_facts, 16 if smoke else PAIRS, draw))
        self.held = self._write("held", list(pairs(held_questions, 2 if smoke else HELD, draw)))
        self.rows = len(training)
        self.pairs = {
            True: self._write("pairs", training),
            False: self._write("verdicts", [{**row, "reasoning": ""} for row in training]),
        }

    def _write(self, name: str, rows: Sequence[dict[str, str]]) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.jsonl"
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def config(self, name: str) -> RunConfig:
        """Returns the configuration of a variant."""
        variant = VARIANTS[name]
        config = judge_config(
            self.model,
            [self.pairs[variant.reasons]],
            self.held,
            "grpo",
            {"rollout.max_new_tokens": REPLY},
            scalar=variant.scalar,
        )
        steps = 1 if self.smoke else variant.epochs * self.rows * (2 - variant.scalar) // BATCH
        settings: dict[str, Any] = {"sft.steps": steps, "sft.batch": 4 if self.smoke else BATCH}
        settings |= {"sft.optim.learning_rate": variant.rate or 1e-4, "mesh.fsdp": 1}
        settings |= {"sft.optim.warmup_steps": min(6, steps), "sft.optim.schedule": "cosine"}
        settings |= {"sft.micro_batch_tokens": 560, "sft.save_every": 20, "seed": self.seed}
        settings |= {"run_dir": str(self.folder / name.replace(", ", "_").replace(" ", "_"))}
        lengths = CHATS if variant.scalar else (EXAMPLE,)
        config = apply(config, settings)
        rollout = dataclasses.replace(config.rollout, prompt_buckets=(PROMPT,), slots=16)
        sft = dataclasses.replace(config.sft, buckets=lengths)
        return dataclasses.replace(config, rollout=rollout, sft=sft)

    def measure(self, name: str) -> dict[str, Any]:
        """Trains a variant and returns its row."""
        variant, config = VARIANTS[name], self.config(name)
        began, weights = time.perf_counter(), self.model
        if variant.rate:
            result = run_sft(config, kind=ScalarTrainer) if variant.scalar else run_sft(config)
            if result["stopped"]:
                raise SystemExit("stopped: the same command continues")
            weights = config.directory
        minutes = (time.perf_counter() - began) / 60
        agreement = self._agreement(config, weights, variant.scalar)
        experiments.forget_compiled()
        row = {"variant": name, "seed": self.seed, "commit": experiments.commit()}
        row |= {"hash": experiments.config_hash(config), "training_minutes": round(minutes, 2)}
        row |= {"pairs": agreement.pairs, **{share: known(agreement, share) for share in SHARES}}
        rulings = experiments.finished(Path(config.directory) / "judged" / RULINGS)
        prompts = [row["prompt"] for row in experiments.finished(self.held)]
        return row | by_fact(rulings, prompts)

    def _agreement(self, config: RunConfig, weights: str, scalar: bool) -> Agreement:
        out = f"{config.directory}/judged"
        training, held_pairs = split_pairs(config.data)
        if not scalar:
            return judged(
                held_pairs,
                own_judge(config.policy, config.data, config.seed, weights),
                {"judge": weights},
                out,
            )
        rate = ScalarModel(
            config.policy, config.data, weights, CHATS, config.sft.micro_batch_tokens
        )
        rated = Rated(rate, training)
        return report(rated.ruled(held_pairs), {"judge": weights, "tie_margin": rated.margin}, out)


def by_fact(rulings: Sequence[dict[str, Any]], prompts: Sequence[str]) -> dict[str, Any]:
    """Returns the share of the most frequent gold verdict, and 95% bootstrap intervals over the
    facts of agreement and tie recall; rulings and their questions are in the same order.
    """
    gold = np.array([row["gold"] for row in rulings])
    joint = [both_orders(row["first"], row["swapped"]) for row in rulings]
    judged_pairs = np.array([one is not None for one in joint])
    right = np.array([one == label for one, label in zip(joint, gold, strict=True)])
    facts, place = np.unique(prompts, return_inverse=True)
    draws = np.random.default_rng(0).integers(0, len(facts), (2000, len(facts)))
    out: dict[str, Any] = {"facts": len(facts)}
    out["majority"] = round(float(np.unique(gold, return_counts=True)[1].max() / len(gold)), 4)
    for name, counted in (("agreement", judged_pairs), ("tie_recall", judged_pairs & (gold == 0))):
        sums = np.bincount(place, counted & right), np.bincount(place, counted)
        with np.errstate(invalid="ignore"):
            shares = sums[0][draws].sum(1) / sums[1][draws].sum(1)
        low, high = np.nanpercentile(shares, (2.5, 97.5)) if counted.any() else (None, None)
        ends = None if low is None else [round(float(low), 4), round(float(high), 4)]
        out[f"{name}_interval"] = ends
    return out


def known(agreement: Agreement, share: str) -> float | None:
    """Returns a share, None for one of zero pairs."""
    value = getattr(agreement, share)
    return None if value != value else round(value, 4)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown, of means over the seeds."""
    names = [*SHARES, "training_minutes"]
    titles = [name.replace("_", " ") for name in names]
    lines = [f"| | seeds | {' | '.join(titles)} |", "|---" * (len(names) + 2) + "|"]
    for variant, runs in rl_runs.by_variant(rows).items():
        cells = [variant, str(len(runs))]
        for name in names:
            values = [row[name] for row in runs if row[name] is not None]
            cells.append(rl_runs.spread(values) if values else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Runs the variants that are not finished yet, then writes the table."""
    if argv is None:
        tune_allocator()
    args = rl_runs.parser(__doc__ or "", NAME, seeds=(0,), variants=tuple(VARIANTS)).parse_args(
        argv
    )
    out = Path(args.out)
    results = out / f"{NAME}.jsonl"
    for seed, name in itertools.product(args.seeds, args.only):
        done = {(row["variant"], row["seed"]) for row in experiments.finished(results)}
        if (name, seed) not in done:
            experiments.append(results, Trial(seed, out, args.smoke).measure(name))
    rows = experiments.finished(results)
    write_atomically(out / f"{NAME}.md", table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
