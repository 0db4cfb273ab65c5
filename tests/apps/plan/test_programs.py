"""The list of a run's programs, which the plan compiles: a run compiles no large program that is
missing from it.
"""

import dataclasses
import logging
import re
from collections import Counter
from contextlib import contextmanager

import jax
import pytest
from evolve import with_size
from replaying import GroupReplay
from tiny_run import tiny_run

from compass_jax.apps.plan.programs import fresh_state, live_parts, planned, run_programs
from compass_jax.config import ZeroVarianceConfig, named_correction
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.model import routes
from compass_jax.model.params import training_layout
from compass_jax.model.transformer import Transformer
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.objectives.grpo import grpo
from compass_jax.rollout.drafts import Coupled
from compass_jax.rollout.engine import Engine
from compass_jax.training import loop, step
from compass_jax.training.ahead import CompileAhead
from compass_jax.training.rl import run_rl
from compass_jax.weights import sync

JITTED = type(jax.jit(lambda x: x))
LARGE = {
    function.__name__
    for room in (Engine, step, routes, sync)
    for function in vars(room).values()
    if isinstance(function, JITTED)
}
PATTERN = r"Compiling jit\((\w+)\) with global shapes and types (.*?)\. A"


@contextmanager
def compiled():
    """Counts the programs lowered in the context as (name, shapes and types of the arguments that
    it reads).
    """
    counts = Counter()

    class Reader(logging.Handler):
        def emit(self, record):
            match = re.match(PATTERN, record.getMessage())
            if match and match[1] in LARGE:
                counts[match[1], match[2].replace(", weak_type=True", "")] += 1

    logger, reader = logging.getLogger("jax._src.interpreters.pxla"), Reader()
    jax.clear_caches()
    logger.addHandler(reader)
    jax.config.update("jax_log_compiles", True)
    try:
        yield counts
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.removeHandler(reader)


def listed(config):
    """Returns the programs of a run on one device."""
    tokenizer = load_tokenizer(config.data, config.model.vocab_size)
    known, layout = tokenizer.vocab_size, training_layout(config.compute)
    model = Transformer(config.model, config.compute, layout, None, known)
    engine = Engine(
        config.model, config.policy.rollout_compute, config.rollout, tokenizer.eos_id, None, known
    )
    state = fresh_state(model, config.lora, config.rl.optim)
    return list(
        run_programs(
            config.policy, config.scored, config.learner, engine, model, state, stored=False
        )
    )


def changed(config, **changes):
    """Returns `config` with changed fields in its parts ("rl" and so on)."""
    parts = {
        name: dataclasses.replace(getattr(config, name), **part) for name, part in changes.items()
    }
    return dataclasses.replace(config, **parts)


TIS = named_correction("tis")
GROWN = ZeroVarianceConfig(rl_zvp=True, grow_to=8)
VARIANTS = {
    "growth, evaluation": {"rl": {"steps": 1, "zero_variance": GROWN}},
    "partial, pages": {
        "rl": {"partial_prompts": 3, "correction": TIS, "buckets": (40, 56)},
        "rollout": {"cache_pages": 24, "page_tokens": 8, "slots": 6},
        "data": {"eval_prompts": 0},
    },
    "drafts": {
        "rl": {"drafts": Coupled(), "steps": 3},
        "rollout": {"cache_pages": 24, "page_tokens": 8, "slots": 6},
        "data": {"eval_prompts": 0, "sources": with_size(tiny_run().data, 6).sources},
    },
    "replay of groups": {
        "rl": {
            "steps": 3,
            "correction": TIS,
            "zero_variance": ZeroVarianceConfig(rl_zvp=False),
            "hooks": (GroupReplay(groups=8, max_age=2, max_route_age=1),),
        }
    },
    "R2, reference": {"rl": {"replay": "R2", "objective": grpo(kl_coef=0.1)}},
    "R2, packed rows": {"rl": {"replay": "R2", "packed_row_tokens": 112}},
    "dynamic, without truncated answers": {
        "rl": {"mask_truncated": True, "zero_variance": ZeroVarianceConfig(dynamic_sampling=True)}
    },
    "prediction": {
        "rl": {
            "advantage": Shrunk(),
            "step_policy": Screening(),
            "zero_variance": ZeroVarianceConfig(posterior=True),
        }
    },
}
QUICK = list(VARIANTS)[:1]
CASES = [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in VARIANTS]


@pytest.mark.parametrize("variant", CASES)
def test_a_run_compiles_no_large_program_that_is_not_listed(tmp_path, variant, monkeypatch):
    config, compiled_ahead = changed(tiny_run(), **VARIANTS[variant]), []

    class Patient(CompileAhead):
        def finish(self):
            self._thread.join()
            compiled_ahead.extend(self.compiled)

    monkeypatch.setattr(loop, "CompileAhead", Patient)
    with compiled() as ran:
        run_rl(dataclasses.replace(config, run_dir=str(tmp_path / "run")))
    with compiled() as on_list:
        results, planned_prefill = {}, Counter()
        last = next(x for x in planned(listed(config)) if x.name == "prefill")
        for program in listed(config):
            before = on_list.copy()
            results[program] = program.lower(results).out_info
            if program.name == "prefill" and program.tokens == last.tokens:
                planned_prefill += on_list - before
    assert {"_prefill", "bulk_insert", "_generate", "pull", "apply"} <= {name for name, _ in ran}
    assert ran - on_list == Counter()
    # the programs compiled during the first rollout are those that the training called
    assert {"prepare", "apply"} <= set(compiled_ahead)
    assert {n for (name, _), n in ran.items() if name in vars(step)} == {1}
    # the plan compiles the programs that the run used
    assert planned_prefill and set(planned_prefill) <= set(ran)


PLANNED = {**VARIANTS, "held sessions": {"rollout": {"hold_sessions": True}}}


@pytest.mark.parametrize("variant", PLANNED)
def test_the_plan_knows_what_is_live_beside_every_program(variant):
    config = changed(tiny_run(), **PLANNED[variant])
    for program in planned(listed(config)):
        assert live_parts(program, config.rl, disaggregated=False), program.name


def shapes(program):
    return [x.shape for x in jax.tree.leaves(program.arguments) if hasattr(x, "shape")]


def test_grown_groups_are_prefilled_at_their_largest_size():
    """The plan also has room for all groups that can be in flight."""
    config = changed(tiny_run(), rl={"zero_variance": ZeroVarianceConfig(rl_zvp=True, grow_to=16)})
    by_name = {program.name: program for program in planned(listed(config))}
    assert (1, 16, 2) in shapes(by_name["prefill"])
    assert by_name["store"].arguments[1] == 4 * 16
    later = ZeroVarianceConfig(rl_zvp=True, dynamic_sampling=True, dynamic_batch=3)
    for rl, groups in (
        ({"zero_variance": later}, 3 * 4 + 4),
        ({"partial_prompts": 2, "correction": TIS}, 4 + 2),
        ({"hooks": (GroupReplay(groups=8, max_route_age=1),)}, 4 + 8),
        ({"hooks": (GroupReplay(groups=8),)}, 4),
    ):
        by_name = {x.name: x for x in planned(listed(changed(tiny_run(), rl=rl)))}
        assert by_name["store"].arguments[1] == groups * 4
