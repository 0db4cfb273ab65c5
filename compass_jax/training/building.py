"""Makes a trainer: opens the engine, the prompts and the hooks of a run's stage, and continues from
its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Float

from compass_jax.base.records import Prompt
from compass_jax.config import RunConfig
from compass_jax.config.curriculum import at_step, stage_at
from compass_jax.data.difficulty import label_of
from compass_jax.data.keep import kept_prompts
from compass_jax.data.predictors.inputs import PredictorInputs
from compass_jax.data.prompts import evaluation_sets, fitting, train_prompts
from compass_jax.data.selectors import prompt_selector
from compass_jax.data.stream import PromptStream
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.distributed import from_main_process
from compass_jax.devices.sharding import Placement, placements
from compass_jax.experience.admission import OpenCollector
from compass_jax.experience.collect import Collector, new_buffer
from compass_jax.experience.drafts import DraftStore, check_turns
from compass_jax.experience.episodes.collection import EpisodeCollection
from compass_jax.experience.episodes.played import Episodes
from compass_jax.experience.evaluate import turns_of
from compass_jax.experience.history import PromptHistory
from compass_jax.model.params import training_layout
from compass_jax.model.transformer import Transformer
from compass_jax.rewards.joined import AnyScorer, check_rows, with_episodes
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.draft_engine import engine_for
from compass_jax.rollout.engine_api import RolloutEngine
from compass_jax.rollout.plain_engine import PlainEngine
from compass_jax.rollout.remote.pool import Pool
from compass_jax.rollout.remote.remote import RemoteEngine
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.hand_over import RolloutWeights, WeightTransport, transport_of
from compass_jax.training.hooks.base import Hook, Hooks
from compass_jax.training.hooks.callbacks import Callbacks
from compass_jax.training.hooks.drafts import DraftAccount
from compass_jax.training.hooks.entropy import EntropyWatch
from compass_jax.training.hooks.guard import Guard
from compass_jax.training.hooks.notices import Notices
from compass_jax.training.hooks.own import own_hooks
from compass_jax.training.hooks.rates import RateFactors
from compass_jax.training.hooks.samples import SampleLog
from compass_jax.training.hooks.step_metrics import PermutedRewards, StepMetrics
from compass_jax.training.hooks.temperature import TemperatureControl
from compass_jax.training.learner import Learner
from compass_jax.training.loop import RLTrainer
from compass_jax.training.memory import check_drafts, check_held_groups
from compass_jax.training.own_engine import OpenEngine, check_own_engine, check_samplers
from compass_jax.training.own_judge import PolicyJudge
from compass_jax.training.parts import Parts, Prompts
from compass_jax.training.prompt_states import prompt_states
from compass_jax.training.saved import SavedRun, Stateful
from compass_jax.training.session import RunState, newest_checkpoint
from compass_jax.weights.checkpoint import Checkpoints
from compass_jax.weights.start import first_parameters, vocab_rows

OpenTransport = Callable[[RolloutEngine], WeightTransport]  # of the run's engine


class Building:
    """A run's stage while its trainer is made.

    Args:
        printed: notices that this run has printed; new ones are added.
        pool: the samplers of config.samplers.
        transport: returns what brings the weights to an engine.
        open_engine: makes the engine that samples (None: this package's).
        episodes: those of the run's sources (None: it has none).
    """

    def __init__(
        self,
        config: RunConfig,
        scorer: AnyScorer,
        run_state: RunState,
        telemetry: Telemetry,
        printed: set[str] | None = None,
        pool: Pool | None = None,
        transport: OpenTransport = transport_of,
        open_engine: OpenEngine | None = None,
        episodes: Episodes | None = None,
    ):
        self.newest = newest_checkpoint(config.directory, telemetry.note)
        self.done = 0 if self.newest is None else self.newest.manifest.step
        self.stage = stage_at(config.rl, self.done)
        check_drafts(config.rl)
        self.rl, rollout = at_step(config.rl, config.rollout, self.done)
        self.config: RunConfig = replace(config, rl=self.rl, rollout=rollout)
        self.policy = self.config.policy
        check_held_groups(config.model, rollout, self.rl, self.policy.sampling_mesh)
        self.scorer, self.run_state, self.telemetry = scorer, run_state, telemetry
        self.episodes = episodes
        self.collection: Callable[..., Collection] = Collection
        if episodes is not None:
            self.collection = partial(EpisodeCollection, episodes=episodes)
        self.printed, self.pool, self.transport = printed, pool, transport
        self.open_engine = open_engine
        self.made: RLTrainer  # by `trainer`, like the next
        self.collect: Collector

    def trainer(self) -> RLTrainer:
        """Returns a trainer that continues the run from its newest checkpoint, to the end of its
        stage (config/curriculum.py).
        """
        config, rl, policy = self.config, self.rl, self.policy
        train, rollout = placements(policy.mesh, policy.local_rollout_mesh, policy.rollout_apart)
        self.tokenizer = load_tokenizer(config.data, config.model.vocab_size)
        self.drafts = DraftStore(rl.drafts) if rl.drafts is not None else None
        engine = self._engine(rollout)
        turns = turns_of(self.tokenizer, config.rollout)
        multiple = 1 if train is None else train.rows_multiple
        tell, printed = self.telemetry.note, self.printed
        settings = rl, policy, config.scored
        self.notices = Notices(*settings, tell, printed, self.done, turns.response, multiple)
        prompts, history = self._prompts(), PromptHistory()
        hooks = Hooks([*self._hooks(prompts)])
        checkpoints = Checkpoints(config.directory, config.model, config.keep_checkpoints)
        if rl.guard.action == "restore":
            # the policy from before the guard's window
            checkpoints.needed_step = hooks.find(Guard).before_window
        sampling = rl.sampling, config.rewards, config.seed
        lengths = history.expected_length
        collect = OpenCollector(engine, self._scorer(), turns, lengths, *sampling, self.collection)
        self.collect = collect
        if self.drafts is not None:
            collect.decided = self.drafts.decided
        buffer = new_buffer(engine, rl.sampling)
        self.notices.at_start(len(prompts.stream), len(prompts.labels))
        stateful: dict[str, Stateful] = {
            "stream": prompts.stream,
            "history": history,
            "selector": prompts.selector,
            "telemetry": self.telemetry,
            **({} if self.drafts is None else {"drafts": self.drafts}),
            **({} if self.episodes is None else {"episodes": self.episodes}),
        }
        saved = SavedRun(config, checkpoints, collect, buffer, prompts.stream, stateful, hooks)
        judge = PolicyJudge(policy, config.scored, self.scorer, engine, self.tokenizer)
        weights = RolloutWeights(self.transport(engine), judge)
        layout = training_layout(config.compute)
        columns = self.tokenizer.vocab_size
        learner = self._learner(
            Transformer(config.model, config.compute, layout, train, columns), saved
        )
        if self.episodes is not None:
            self.episodes.forget_lost(buffer)
        if hooks.find(Guard).ended:
            self.run_state.end("by rl.guard")
        parts = Parts(
            prompts,
            self.tokenizer,
            history,
            collect,
            buffer,
            learner,
            weights,
            saved,
            hooks,
            self.collection,
        )
        self.made = RLTrainer(self.stage, self.done, parts, self.telemetry, self.run_state)
        return self.made

    def _scorer(self) -> AnyScorer:
        if self.episodes is None:
            return self.scorer
        return with_episodes(self.scorer, self.episodes.verdicts)

    def _states(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, "n h"]:
        learner = self.made.learner
        buckets = self.config.rollout.prompt_buckets
        return prompt_states(learner.model, learner.params, prompts, buckets)

    def _version(self) -> int:
        return self.made.learner.version

    def _sample_at(self, temperature: float) -> None:
        self.collect.batcher = partial(self.collection, temperature=temperature)

    def _train_at(self, temperature: float) -> None:
        self.made.learner.temperature = temperature

    def _engine(self, rollout: Placement | None) -> RolloutEngine:
        """Returns the engine of this process's devices, that of the samplers, or the caller's."""
        config = self.config
        if self.open_engine is not None:
            has_own = config.rollout_apart or self.pool is not None
            check_own_engine(self.rl, config.model, config.rollout, config.rewards, has_own)
            inner = self.open_engine(config, self.tokenizer)
            ids = self.tokenizer.end_ids, self.tokenizer.vocab_size
            engine = PlainEngine(inner, config.rollout, *ids, self.rl.correction.acts)
            check_samplers(engine, config.data.evaluated)
            return engine
        settings = config.model, self.policy.rollout_compute, config.rollout
        tokens = self.tokenizer.end_ids, rollout, self.tokenizer.vocab_size
        if self.pool is not None:
            return RemoteEngine(self.pool, *settings, self.policy.sampling_mesh, *tokens)
        find = {} if self.drafts is None else {"find": self.drafts.find}
        return engine_for(self.rl.drafts, *settings, *tokens, **find)

    def _prompts(self) -> Prompts:
        """Reads the prompts, and checks that the verifiers can judge their rows."""
        config, tell = self.config, self.notices.print_once
        longest = config.rollout.prompt_buckets[-1]
        prompts = train_prompts(config.data, self.tokenizer, config.seed, tell)
        prompts = fitting(prompts, longest, config.data.overlong, tell)
        prompts, filter_tokens, measured = kept_prompts(prompts, config.data.keep_file)
        evaluated = evaluation_sets(
            config.data, config.evaluation, self.tokenizer, config.seed, longest, tell
        )
        heldout = (prompt for one in evaluated for prompt in one.prompts)
        check_rows(self.scorer, config.data, [*prompts, *heldout])
        if self.rl.drafts is not None:
            check_turns(self.rl.drafts, prompts)
        repeats = [source.repeat for source in config.data.sources]
        selector = prompt_selector(
            self.rl.zero_variance,
            self.rl.group_size,
            config.rewards,
            config.seed,
            self.stage,
            measured,
            prompts,
            lambda: self.rl.predictor.start(
                PredictorInputs(prompts, config.seed, self._states, self._version)
            ),
        )
        selector.tell, selector.agree = tell, from_main_process
        stream = PromptStream(prompts, config.seed, repeats)
        labels = {label_of(prompt) for prompt in prompts}
        return Prompts(stream, selector, evaluated, labels, filter_tokens)

    def _hooks(self, prompts: Prompts) -> Iterator[Hook]:
        """Yields the run's hooks in the order in which they are called."""
        config, rl, notices = self.config, self.rl, self.notices
        if rl.permute_rewards:
            yield PermutedRewards(config.seed)
        yield notices
        if rl.drafts is not None:
            yield DraftAccount()
        yield StepMetrics(prompts, config.rewards, rl.shaping, self.stage)
        yield EntropyWatch(notices.print_of_kind)
        if rl.entropy.keep:
            yield TemperatureControl(
                rl.entropy, config.rollout.temperature, self._sample_at, self._train_at
            )
        if rl.optim.schedule_tokens or rl.optim.rate_by_groups:
            yield RateFactors(rl.optim, rl.prompts_per_step)
        steady = rl.zero_variance.posterior
        yield Guard(rl.guard, rl.steps, config.rewards, notices.print_of_kind, steady)
        every, telemetry = config.show_samples_every, self.telemetry
        yield SampleLog(config.log, rl.capacity, every, config.rollout, self.tokenizer, telemetry)
        yield Callbacks(config.callbacks)
        yield from own_hooks(rl.hooks)

    def _learner(self, model: Transformer, saved: SavedRun) -> Learner:
        """Restores the run, or starts its learner anew."""
        config, tell = self.config, self.notices.print_once
        if self.newest is not None:
            return saved.restore(self.newest, model, tell)
        params = first_parameters(config.init_from, config.seed, model, tell)
        learner = Learner.start(config.learner, model, params, config.directory)
        self.notices.of_start(learner)
        saved.vocab_rows = vocab_rows(config.init_from, config.model.family, model.columns)
        # Drops the lines of a run that was killed before its first checkpoint.
        self.telemetry.restore(None)
        return learner
