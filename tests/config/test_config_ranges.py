"""Every setting of a run, found by introspection, refuses senseless values by its name, before
anything is built."""

import dataclasses
import time

import pytest
from whole_run import whole_run

from compass_jax.commands import cli
from compass_jax.config import (
    ConfigError,
    ModelConfig,
    MoEConfig,
)
from compass_jax.config.io import config_from_json, config_to_json, from_plain, to_plain
from compass_jax.config.ranges import Characters, Range, field_hints, options

NONSENSE = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "-1": -1,
    "10^30": 10**30,
    "10^400": 10**400,
    "10^5000": 10**5000,
    "2^31": 2**31,
    "true": True,
    "none": None,
    "empty text": "",
    "half a character": "a\ud800",
    "NUL": "a\0b",
    "long text": "a" * 2_000_000,
    "long tuple": (1,) * 10**5,
    "long tuple of texts": ("a",) * 10**5,
    "a list": [1],
}
# The settings in which such a value is valid.
MEANT = {
    "empty text": {
        "run_dir",
        "samplers.address",
        "init_from",
        "rollout.dtype",
        "data.tokenizer",
        "data.cache",
        "data.date",
        "data.system_prompt",
        "data.keep_file",
        "sft.response_field",
        "rewards.answer_tag",
        "rewards.judge.key_env",
        "data.sources.0.label",
        "data.sources.0.instruction",
        "data.sources.0.gold",
        "data.sources.1.label",
        "data.sources.1.gold",
    },
    "none": {
        "rollout_mesh",
        "model.moe",
        "model.mla",
        "model.rope_scaling",
        "model.rope_scaling.attention_factor",
        "rl.verdict_ticks",
        "rewards.judge",
        "rewards.smallest_gap",
        "rewards.conversation_s",
        "evaluation.prompts",
        "evaluation.start_prompts",
        "rl.step_policy",
        "rl.drafts",
    },
    "2^31": {
        "seed",
        "model.rope_theta",
        "rl.optim.clip_grad_norm",
        "sft.optim.clip_grad_norm",
        "rewards.right_at",
        "rewards.smallest_gap",
        "rl.drafts.kept_tokens",
    },
    "-1": {"rewards.wrong_at"},
}
# Only reasoning-gym or a judge's endpoint can check these.
OF_OTHERS = ("-1", "2^31", "true", "empty text")
THEIRS = ("data.sources.0.options.", "rewards.judge.fields.0.1")


def leaves(value, path=()):
    """Yields every (path, value) below a configuration, with parts, tuples and their entries."""
    if path:
        yield path, value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), (*path, field.name))
    for i, entry in enumerate(value) if isinstance(value, tuple) else ():
        yield from leaves(entry, (*path, i))


def put(value, path, new):
    """Returns `value` with `new` at a path."""
    if not path:
        return new
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        return (*value[:first], put(value[first], rest, new), *value[first + 1 :])
    return dataclasses.replace(value, **{first: put(getattr(value, first), rest, new)})


RUN = whole_run()
PATHS = sorted({path for path, _ in leaves(RUN)}, key=str)


def test_the_walk_reaches_every_setting():
    assert len(PATHS) > 150 and RUN.validate_for_rl() is RUN
    names = {".".join(map(str, path)) for path in PATHS}
    allowed = set().union(*MEANT.values())
    assert (
        allowed <= names
        and {"rl.optim.b1", "mesh.fsdp", "data.sources.0.options.0.1", "rewards.timeout_s"} <= names
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", NONSENSE)
def test_what_means_nothing_is_refused_by_the_name_of_the_setting(kind):
    value = NONSENSE[kind]
    silent = []
    for path in PATHS:
        name = ".".join(map(str, path))
        if name in MEANT.get(kind, ()) or (kind == "true" and isinstance(get(path), bool)):
            continue
        if name.startswith(THEIRS) and kind in OF_OTHERS:
            continue
        try:
            put(RUN, path, value).validate_for_rl()
            silent.append(name)
        except ConfigError as error:
            field = [part for part in path if isinstance(part, str)][-1]
            assert field in str(error) and len(str(error)) < 600, (name, str(error))
    assert silent == []


def get(path):
    return dict(leaves(RUN))[path]


def rules(hint):
    """Yields the Range of every number in a field's type, or None for a number without one."""
    for option in options(hint):
        inner = getattr(option, "__metadata__", None)
        base = option.__origin__ if inner else option
        if base in (int, float):
            yield inner[0] if inner else None
        for part in (
            getattr(base, "__args__", ())
            if not isinstance(base, type) or hasattr(base, "__args__")
            else ()
        ):
            if not isinstance(part, str) and part is not Ellipsis:
                yield from rules(part)


def test_every_number_declares_its_range():
    classes = {type(value) for value in configurations(RUN)}
    bare = [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, hint in field_hints(cls).items()
        for rule in rules(hint)
        if not isinstance(rule, Range | Characters)
    ]
    bare = {name for name in bare if not name.startswith("RewardConfig.")}
    free = {f"{of}.verifier_args" for of in ("ProceduralSource", "FileSource")}
    free |= {"ProceduralSource.options", "JudgeConfig.fields"}
    free |= {"DataConfig.template_args", "OptimConfig.options"}
    assert len(classes) >= 18 and bare == free


def configurations(value):
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from configurations(getattr(value, field.name))
    for entry in value if isinstance(value, tuple) else ():
        yield from configurations(entry)


def test_absurd_sizes_are_refused_at_once(tmp_path, capsys):
    """Counts of layers, experts and repeats are checked before code loops over them."""
    (tmp_path / "file.py").write_text(
        "from test_config_ranges import RUN\n\ndef run():\n    return RUN\n"
    )
    start = time.monotonic()
    for words, message in (
        (["--model.layers", "2147483648"], "model.layers = 2147483648: must be at most 1000"),
        (["--model.moe.experts", "1" + "0" * 9], "must be at most 65535 (a route has 16 bits)"),
        (["--data.sources.0.repeat", "1" + "0" * 9], "sources[0].repeat = 1000000000: must be at"),
        (
            ["--model.layers", "1000", "--model.hidden", "1048576", "--model.ffn", "1048576"],
            "parameters, at most 1e+13",
        ),
    ):
        assert cli.main(["train", str(tmp_path / "file.py"), *words, "--dry-run", "--json"]) == 2
        output = capsys.readouterr().err
        assert message in output and output.count("\n") == 1
    deep = ["--data.sources.0.options", "[" * 100_000]
    assert cli.main(["train", str(tmp_path / "file.py"), *deep, "--dry-run", "--json"]) == 2
    assert "options: nested deeper than 64" in capsys.readouterr().err
    assert time.monotonic() - start < 30


def test_models_that_were_published_are_within_the_bounds():
    kimi = MoEConfig(experts=384, top_k=8, ffn=2048)
    sizes = {"vocab_size": 163_840, "hidden": 7168, "layers": 61, "heads": 64, "kv_heads": 64}
    ModelConfig("qwen3_moe", **sizes, head_dim=128, ffn=18_432, moe=kimi).validate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested deeper than 64"),
        ('{"name": "a", "name": "b"}', "the key 'name' comes twice"),
        ('{"name": "\\ud800"}', "half a character"),
        ("3", "RunConfig is read from an object, not from 3"),
        ('{"model": {"family": ["qwen3"]}, "name": "x"}', "model: vocab_size, .* must be given"),
        ('{"rl": {"steps": 1e400}}', "1e400 is not finite"),
        ('{"rl": {"steps": ' + "9" * 400 + "}}", "more than 19 digits"),
        ('{"data": {"sources": [{"kind": []}]}}', r"sources\.0\.kind = \[\]: must be one of"),
        ('{"' + "x" * 10**6 + '": 1}', "xxx: no such key"),
    ],
)
def test_a_configuration_that_is_no_good_json_is_refused(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config_from_json(text)
    assert len(str(caught.value)) < 400


def test_values_read_from_json_are_checked_like_those_of_the_command_line():
    plain = to_plain(RUN.rl.optim)
    assert from_plain(type(RUN.rl.optim), plain) == RUN.rl.optim
    for wrong in (True, 10**400, [1], {"a": 1}, None, "0.1", -1):
        with pytest.raises(ConfigError, match=r"^learning_rate = "):
            from_plain(type(RUN.rl.optim), plain | {"learning_rate": wrong})
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="deeper"):
        from_plain(type(RUN.data), {"sources": [{"kind": "ProceduralSource", "options": deep}]})
    assert config_from_json(config_to_json(RUN)) == RUN
