"""The checks that every engine of the contract (compass_jax/rollout/engine_api.py) must pass, as
functions of an engine. Run as a program they check JetStream's mock engine, in a separate process
because importing JetStream also imports TensorFlow:

    python conformance.py       prints {check: "" or a traceback}
"""

from __future__ import annotations

import inspect
import json
import traceback

import jax
import numpy as np

from compass_jax.rollout import engine_api

TOKENS = np.array([5, 3, 8, 0, 0, 0, 0, 0], np.int32)
OTHER = np.array([2, 9, 4, 7, 6, 0, 0, 0], np.int32)


def contract():
    """Returns name -> method or property of the protocol."""
    return {name: x for name, x in vars(engine_api.Engine).items() if not name.startswith("_")}


def parameters(function):
    """Returns name -> parameter, without self, *args and **kwargs."""
    arguments = dict(list(inspect.signature(function).parameters.items())[1:])
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: x for name, x in arguments.items() if x.kind not in variable}


def started(engine, params, prompts):
    """Returns a decoding state with a prompt in each of the first slots."""
    state = engine.init_decode_state()
    for slot, tokens in enumerate(prompts):
        length = int(np.count_nonzero(tokens))
        prefix = engine.prefill(params=params, padded_tokens=tokens, true_length=length)
        if (place := engine.get_prefix_destination_sharding()) is not None:
            prefix = jax.device_put(prefix, place)
        state = engine.insert(prefix, state, slot)
    return state


def generated(engine, params, state, slot, calls):
    """Returns one slot's valid tokens, and its length after each call."""
    tokens, lengths = [], []
    for _ in range(calls):
        state, results = engine.generate(params, state)
        results.copy_to_host_async()
        result = results.convert_to_numpy().get_result_at_slot(slot)
        assert result.tokens.shape == result.valid.shape
        assert result.tokens.shape[0] == result.lengths.shape[0] == engine.samples_per_slot
        tokens += result.tokens[0][result.valid[0].astype(bool)].tolist()
        lengths.append(int(result.lengths[0]))
        assert lengths[-1] == len(tokens)
    return tokens, lengths


def check_methods_and_their_parameters(engine, params):
    for name, member in contract().items():
        if isinstance(member, property):
            continue
        implemented, declared = parameters(getattr(type(engine), name)), parameters(member)
        missing = [x for x in declared if x not in implemented]
        required = [x for x, p in implemented.items() if x not in declared and p.default is p.empty]
        assert not missing, f"{name} lacks {missing}"
        assert not required or name == "load_params", f"{name} needs {required}"


def check_properties(engine, params):
    sizes = engine.max_concurrent_decodes, engine.samples_per_slot, engine.max_prefill_length
    assert all(isinstance(size, int) and size > 0 for size in sizes)
    assert isinstance(engine.mesh, jax.sharding.Mesh)


def check_each_call_returns_tokens_and_counts_them(engine, params):
    tokens, lengths = generated(engine, params, started(engine, params, [TOKENS]), 0, 2)
    assert 0 < lengths[0] < lengths[1] == len(tokens)


def check_slots_do_not_disturb_each_other(engine, params):
    alone, _ = generated(engine, params, started(engine, params, [OTHER]), 0, 1)
    with_neighbour, _ = generated(engine, params, started(engine, params, [OTHER, TOKENS]), 0, 1)
    second, _ = generated(engine, params, started(engine, params, [TOKENS, OTHER]), 1, 1)
    assert alone == with_neighbour == second


def check_a_slot_is_used_again(engine, params):
    fresh, _ = generated(engine, params, started(engine, params, [TOKENS]), 0, 1)
    state, _ = engine.generate(params, started(engine, params, [OTHER]))
    prefix = engine.prefill(params=params, padded_tokens=TOKENS, true_length=3)
    reused, lengths = generated(engine, params, engine.insert(prefix, state, 0), 0, 1)
    assert reused == fresh and lengths == [len(fresh)]


def check_an_existing_prefix_is_continued_or_refused(engine, params):
    begun = engine.prefill(params=params, padded_tokens=TOKENS, true_length=3)
    try:
        options = dict(padded_tokens=OTHER, true_length=5, existing_prefix=begun)
        prefix = engine.prefill(params=params, **options)
    except NotImplementedError:
        return
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    whole = np.concatenate([TOKENS[:3], OTHER[:5]])
    expected, _ = generated(engine, params, started(engine, params, [whole]), 0, 2)
    assert generated(engine, params, state, 0, 2)[0] == expected


CHECKS = {name: x for name, x in list(globals().items()) if name.startswith("check_")}


def check_the_protocol_is_jetstreams():
    """Checks that every method and property of JetStream's class is in the protocol, with the same
    parameters.
    """
    from jetstream.engine import engine_api as jetstream

    jetstream_members = {n: x for n, x in vars(jetstream.Engine).items() if not n.startswith("_")}
    members = contract()
    assert members.keys() == jetstream_members.keys(), members.keys() ^ jetstream_members.keys()
    for name, member in jetstream_members.items():
        assert isinstance(member, property) == isinstance(members[name], property), name
        if not isinstance(member, property):
            assert [*parameters(member)] == [*parameters(members[name])], name
    result_fields = inspect.get_annotations(engine_api.ResultTokens)
    fields = [*inspect.get_annotations(jetstream.ResultTokens)]
    assert [*result_fields][: len(fields)] == fields


def main() -> None:
    """Runs the checks on JetStream's mock engine."""
    from jetstream.engine.mock_engine import TestEngine

    engine = TestEngine(batch_size=4, cache_length=32, weight=2.0)
    params = engine.load_params()
    checks = {name: lambda check=check: check(engine, params) for name, check in CHECKS.items()}
    checks["check_the_protocol_is_jetstreams"] = check_the_protocol_is_jetstreams
    reports = {}
    for name, check in checks.items():
        try:
            check()
            reports[name] = ""
        except Exception:
            reports[name] = traceback.format_exc()
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
