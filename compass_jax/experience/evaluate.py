"""Accuracies on held-out prompts and on evaluation sets, through the rollout and the verifiers of
training.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import jax
from rich.console import Console

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.base.records import Group, Prompt, Rollout, SampleKey, Score
from compass_jax.config import (
    ConfigError,
    DataConfig,
    EvalConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ScoredConfig,
)
from compass_jax.config.data import HELDOUT
from compass_jax.data.chat_detection import with_chat_format
from compass_jax.data.prompts import PromptSet, evaluation_sets
from compass_jax.data.questions import OVERLAP, unique_notices
from compass_jax.data.tokenizer import Tokenizer, load_tokenizer
from compass_jax.data.turns import turn_encoder
from compass_jax.devices.distributed import is_main_process
from compass_jax.devices.sharding import placements
from compass_jax.experience.accuracy import Evaluation, SetResult, set_result, tally
from compass_jax.experience.episodes.collection import EpisodeCollection
from compass_jax.experience.episodes.played import Episodes
from compass_jax.experience.evaluated import (
    answer_rows,
    summary_of,
    table_rows,
    words_of,
    write_evaluation,
)
from compass_jax.experience.judged import failure_of, sample_of, silence, silence_warning
from compass_jax.experience.scorer import open_scorer
from compass_jax.experience.turns import Turns
from compass_jax.model.params import abstract_params, shardings_like
from compass_jax.rewards.checks import votes as votes_of
from compass_jax.rewards.detect import notice
from compass_jax.rewards.joined import AnyScorer, check_rows, with_episodes
from compass_jax.rewards.tasks.task import talks
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.engine_api import RolloutEngine
from compass_jax.rollout.programs import EngineWorkload
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.runs.report import summary_table
from compass_jax.runs.rundir import ANSWERS, SUMMARY, FolderLock
from compass_jax.weights.average import average_notice
from compass_jax.weights.start import init_or_load, is_checkpoint
from compass_jax.weights.sync import sync_weights

NOTHING_TO_EVALUATE = (
    "data.eval_prompts = 0 and data.eval_sets is empty: there is nothing to evaluate on"
)


def answers(
    engine: RolloutEngine,
    params: Tree,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    scorer: AnyScorer,
    *,
    samples: int,
    sampler: Sampler,
    seed: int,
    purpose: Purpose = Purpose.EVAL,
    finished: Callable[[], None] = lambda: None,
    collection: Callable[..., Collection] = Collection,
) -> tuple[list[list[Rollout]], list[list[Score]]]:
    """Returns `samples` scored rollouts of every prompt, in order. Draws depend on (seed, purpose,
    prompt, sample, position) only. `finished` is called when an answer,
    or the first turn of a conversation, is generated.
    """
    turns = turns_of(tokenizer, engine.config)
    rollouts: dict[SampleKey, Rollout] = {}
    scores: dict[SampleKey, Score] = {}
    keys, carried = None, list[Rollout]()
    # The first round runs all samples, later ones the conversations that an environment continues.
    while keys is None or carried:
        options: JsonObject = {"sample_keys": keys, "carried": carried, "keep_routes": False}
        waiting: set[SampleKey] = set()
        for rollout in collection(
            engine, params, prompts, samples, purpose, seed, sampler=sampler, **options
        ):
            if rollout.key not in rollouts:
                finished()
            rollouts[rollout.key] = rollout
            waiting.add(rollout.key)
            scorer.submit(rollout.key, rollout.prompt, partial(turns.text, rollout))
        carried = []
        while waiting:
            for key, score in scorer.collect(block=True):
                waiting.discard(key)
                rollouts[key], verdict = turns.settled(rollouts[key], score)
                if verdict is None:
                    carried.append(rollouts[key])
                else:
                    scores[key] = verdict
        keys = frozenset(rollout.key for rollout in carried)
    rows = [[prompt.sample(c) for c in range(samples)] for prompt in prompts]
    return [[rollouts[x] for x in row] for row in rows], [[scores[x] for x in row] for row in rows]


def turns_of(tokenizer: Tokenizer, config: RolloutConfig) -> Turns:
    """Returns the conversion between environments' texts and a tokenizer's tokens."""
    return Turns(
        tokenizer.decode_response,
        turn_encoder(tokenizer),
        config.max_new_tokens,
        tokenizer.opened_thought,
    )


def evaluation_uses(
    e: EvalConfig, data: DataConfig, rollout: RolloutConfig
) -> list[EngineWorkload]:
    """Returns an evaluation's workloads on the engine, for the held-out prompts and each set: k
    samples of each prompt, then one greedy answer. Duplicates are merged.
    """
    goes_on = rollout.cache_pages > 0 or talks(data)
    sampling = [(e.k, e.temperature)] if data.eval_prompts else []
    sampling += [
        (one.k or e.k, e.temperature if one.temperature is None else one.temperature)
        for one in data.eval_sets
    ]
    uses = [
        EngineWorkload("evaluation", k, (Sampler(temperature, e.top_k, e.top_p),), goes_on=goes_on)
        for k, temperature in dict.fromkeys(sampling)
    ]
    return (
        [*uses, EngineWorkload("evaluation", 1, (Sampler(0.0),), goes_on=goes_on)] if uses else []
    )


Keep = Callable[[str, list[Group]], None]
Progress = Callable[[int, int], None]  # of (answers that are generated, all answers)


def evaluate(
    engine: RolloutEngine,
    params: Tree,
    sets: Sequence[PromptSet],
    tokenizer: Tokenizer,
    scorer: AnyScorer,
    config: ScoredConfig,
    keep: Keep | None = None,
    progress: Progress = lambda done, total: None,
    collection: Callable[..., Collection] = Collection,
) -> Evaluation:
    """Samples k answers and one greedy answer for every prompt of every set (data/prompts.py makes
    them); an answer is right if reward >= rewards.right_at. `keep` is called with each set's name
    and a group for each of its prompts, the greedy answer last; `progress` after each answer.
    """
    results, warnings, e = dict[str, SetResult](), [], config.evaluation
    total, counter = count_answers(sets), itertools.count(1)
    progress(0, total)

    def finished() -> None:
        progress(next(counter), total)

    votes = votes_of(with_chat_format(config.data), config.rewards.answer_tag)
    for name, prompts, k, temperature in sets:
        ask = partial(
            answers,
            engine,
            params,
            prompts,
            tokenizer,
            scorer,
            seed=config.seed,
            finished=finished,
            collection=collection,
        )
        rollouts, sampled = ask(samples=k, sampler=Sampler(temperature, e.top_k, e.top_p))
        best, greedy = ask(samples=1, sampler=Sampler(0.0))
        pairs = zip(prompts, rollouts, best, sampled, greedy, strict=True)
        groups = [Group(p, (*r, *one), (*s, *verdict)) for p, r, one, s, verdict in pairs]
        if keep is not None:
            keep(name, groups)
        right_at, text_of = config.rewards.right_at, turns_of(tokenizer, config.rollout).response
        tallies = [tally(group, right_at, votes, text_of) for group in groups]
        settings = (temperature, OVERLAP, config.rewards, config.seed)
        results[name] = set_result(groups, tallies, *settings)
        of = "of the evaluation" + (f" on {name}" if name != HELDOUT else "")
        warnings.append(_warning(groups, of, text_of, config.rewards, config.data))
    return _evaluation(results, "\n".join(filter(None, warnings)), e.k, config.rewards.right_at)


def count_answers(sets: Sequence[PromptSet]) -> int:
    """Returns the number of answers of an evaluation: k samples and a greedy one of each prompt."""
    return sum(len(one.prompts) * (one.k + 1) for one in sets)


def start_sets(sets: Sequence[PromptSet], most: int | None, answers: int) -> list[PromptSet]:
    """Returns the sets that are evaluated before the first step: evenly chosen prompts of each, at
    most `most` (evaluation.start_prompts), or so few that they have at most `answers` answers.
    """
    share = min(answers / max(count_answers(sets), 1), 1.0) if most is None else 1.0
    return [evenly(one, most or max(int(len(one.prompts) * share), 1)) for one in sets]


def evenly(one: PromptSet, most: int) -> PromptSet:
    """Returns the set with at most `most` of its prompts, evenly chosen."""
    count = min(len(one.prompts), most)
    places = [i * len(one.prompts) // count for i in range(count)]
    return one._replace(prompts=[one.prompts[i] for i in places])


def _evaluation(results: dict[str, SetResult], warning: str, k: int, right_at: float) -> Evaluation:
    common: JsonObject = {
        "warning": warning,
        "right_at": right_at,
        "sets": results,
    }
    heldout = results.get(HELDOUT)
    if heldout is None:
        return Evaluation(k, 0, math.nan, math.nan, math.nan, 0, **common)
    return Evaluation(
        heldout.k,
        heldout.prompts,
        heldout.avg_at_k,
        heldout.pass_at[heldout.k],
        heldout.greedy,
        heldout.unscored,
        {label: (one.prompts, one.avg_at_k, one.greedy) for label, one in heldout.by.items()},
        heldout.extracted,
        heldout.kinds,
        reward=heldout.reward,
        **common,
    )


def _warning(
    groups: Sequence[Group],
    of: str,
    text_of: Callable[[Rollout], str],
    rewards: RewardConfig,
    data: DataConfig,
) -> str:
    """Returns a warning about samples whose rewards carry no information; empty otherwise."""
    sampled = [
        Group(group.prompt, group.rollouts[:-1], group.scores[:-1])  # without the greedy answer
        for group in groups
    ]
    flat = [score for group in sampled for score in group.scores]
    if why := failure_of(sampled):
        return f"warning: {why}; nothing {of} has a reward"
    kind = silence(flat, rewards)
    if not kind:
        return ""
    sample = sample_of(sampled, text_of)
    return silence_warning(kind, of, sample, flat, rewards, data)


def decoder_of(
    policy: PolicyConfig, data: DataConfig, seed: int, weights: str
) -> tuple[Engine, Tree, Tokenizer]:
    """Returns engine, decode weights and tokenizer for the weights of a run directory, a checkpoint
    or a Hugging Face folder.
    """
    tokenizer = load_tokenizer(data, policy.model.vocab_size)
    engine = Engine(
        policy.model,
        policy.rollout_compute,
        policy.rollout,
        tokenizer.end_ids,
        placements(policy.sampling_mesh, None, False)[1],
        tokenizer.vocab_size,
    )
    return engine, decoding_weights(policy, seed, weights, engine), tokenizer


def decoding_weights(policy: PolicyConfig, seed: int, weights: str, engine: Engine) -> Tree:
    """Loads the weights of a run directory, a checkpoint or a Hugging Face folder in the layout
    that `engine` decodes with.
    """
    placement = engine.placement
    shardings = (
        None
        if placement is None
        # Shardings depend on shapes, not on the dtype.
        else shardings_like(abstract_params(policy.model, "float32"), policy.model, placement)
    )
    params = init_or_load(
        weights,
        policy.model,
        policy.compute,
        jax.random.key(seed),
        shardings,
        engine.model.known,
    )
    return sync_weights(
        params,
        policy.model,
        policy.rollout_compute.dtype,
        policy.rollout.quantize,
        placement=placement,
        layout=engine.layout,
    )[0]


OpenEpisodes = Callable[[str], contextlib.AbstractContextManager[Episodes | None]]


class Evaluator:
    """Evaluates several weights with the same engine, programs and prompts.

    open_episodes: opens the episodes of the data's environments, with their logs in a folder; the
    default plays none.

    Raises ConfigError if there are no evaluation prompts.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        scored: ScoredConfig,
        open_episodes: OpenEpisodes = lambda folder: contextlib.nullcontext(),
    ) -> None:
        self._open_episodes = open_episodes
        if not scored.data.evaluated:
            raise ConfigError(NOTHING_TO_EVALUATE)
        self.policy, self.scored = policy, scored
        console = Console(soft_wrap=True, emoji=False, quiet=not is_main_process())
        self.say_once = unique_notices(partial(console.print, highlight=False, markup=False))
        self._loaded: tuple[Engine, Sequence[PromptSet], Tokenizer] | None = None

    def __call__(self, weights: str, out: str | None = None) -> Evaluation:
        """Evaluates weights; arguments and result are those of `evaluate_weights`."""
        policy, config = self.policy, self.scored
        if self._loaded is None:
            engine, decode, tokenizer = decoder_of(policy, config.data, config.seed, weights)
            longest = config.rollout.prompt_buckets[-1]
            settings = config.data, config.evaluation, tokenizer, config.seed, longest
            self._loaded = engine, evaluation_sets(*settings, self.say_once), tokenizer
        else:
            decode = decoding_weights(policy, config.seed, weights, self._loaded[0])
        if weights and is_checkpoint(weights) and (line := average_notice(weights)):
            self.say_once(line)
        engine, sets, tokenizer = self._loaded
        rows: list[JsonObject] = []

        def keep(name: str, groups: list[Group]) -> None:
            rows.extend(answer_rows(name, groups, turns_of(tokenizer, config.rollout).response))

        with (
            open_scorer(config.rewards, config.data) as scorer,
            tempfile.TemporaryDirectory() as folder,
            self._open_episodes(folder if out is None else out) as episodes,
        ):
            check_rows(scorer, config.data, [prompt for one in sets for prompt in one.prompts])
            collection: Callable[..., Collection] = Collection
            if episodes is not None:
                scorer = with_episodes(scorer, episodes.verdicts)
                collection = partial(EpisodeCollection, episodes=episodes)
            work = engine, decode, sets, tokenizer, scorer, config
            keep_rows = keep if out is not None else None
            evaluation = evaluate(*work, keep_rows, collection=collection)
        if out is not None and is_main_process():
            with FolderLock(out) as lock:
                write_evaluation(lock.path, summary_of(evaluation, config, weights), rows)
            self.say_once(
                f"{len(rows)} prompts with their answers: {out}/{ANSWERS}; accuracies: {SUMMARY}"
            )
        if evaluation.warning:
            self.say_once(evaluation.warning)
        return evaluation


def evaluate_weights(config: RunConfig, weights: str, out: str | None = None) -> Evaluation:
    """Returns the accuracy of the weights of a run directory, a checkpoint or a Hugging Face folder
    on the held-out prompts and on `data.eval_sets`.

    Args:
        out: a folder for answers.jsonl and summary.json (`write_evaluation`); None: no files.
    """
    config.validate()
    return Evaluator(config.policy, config.scored)(weights, out)


def run_eval(
    evaluator: Evaluator, checkpoint: str, out: str | None = None, as_json: bool = False
) -> JsonObject:
    """Runs `compass eval`: prints a table for each set and returns the content of summary.json;
    `out` is that of `evaluate_weights`. With `as_json` stdout has the summary only, and stderr
    everything else.
    """
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        evaluation = evaluator(checkpoint, out)
        _show(evaluation, evaluator.scored.rewards, checkpoint)
    summary = summary_of(evaluation, evaluator.scored, checkpoint)
    if as_json and is_main_process():
        print(json.dumps(summary, indent=2))
    return summary


def _show(evaluation: Evaluation, rewards: RewardConfig, checkpoint: str) -> None:
    console = Console(soft_wrap=True, emoji=False, quiet=not is_main_process())
    console.print(notice(rewards.sandbox), highlight=False)
    for name, one in evaluation.sets.items():
        title = f"{checkpoint}: {'held-out prompts' if name == HELDOUT else name}"
        console.print(summary_table(table_rows(one), title=title))
        console.print(words_of(one), highlight=False)
