"""YAML that is no configuration is refused in one line, with the file and the line of the fault;
what YAML may say besides JSON (anchors, merge keys, dates) is read.
"""

import pytest
import yaml
from test_foreign import SHORT

from compass_jax.commands import cli
from compass_jax.commands.configured import load_config
from compass_jax.config import ConfigError
from compass_jax.config.yaml_text import parse_yaml

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (
            "name: x\nseed: " + "1" * 5000,
            2,
            "the integer 11111111111111111111... has more|is no int",
        ),
        ("seed: !!int x", 1, "'x' is no int"),
        ("name: x\n\nseed: 2024-13-45", 3, "'2024-13-45' is no timestamp"),
        ("~: 1", 1, "the key ~ is no text; put it into quotes"),
        ("null: 1", 1, "the key null is no text"),
        ("?\n: 1", 1, "the key null is no text"),
        ("name: x\nrl: " + "[" * 5000, 2, "nested deeper than 64 levels"),
        ("name: x\nrl: " + "[" * 5000 + "]" * 5000, 2, "nested deeper than 64 levels"),
        ("seed: 12345678901234567890", 1, "more than 19 digits"),
        ("seed: 0x" + "f" * 40, 1, "more than 19 digits"),
        ("seed: !!float x", 1, "'x' is no float"),
        ("seed: !!bool x", 1, "'x' is no bool"),
        ("seed: !!timestamp x", 1, "'x' is no timestamp"),
        ("seed: 2024-01-01 25:00:00", 1, "is no timestamp"),
        ("a: 1\n1: 2", 2, "the key 1 is no text"),
        ("a: 1\nyes: 2", 2, "the key yes is no text"),
        ("? [a]\n: 1", 1, "the key a list or a mapping is no text"),
        ("a: !!binary eA==", 1, "type tag:yaml.org,2002:binary is no setting"),
        ("a: !!set {x}", 1, "type tag:yaml.org,2002:set is no setting"),
        (
            "a: !!python/object/apply:os.system [x]",
            1,
            "python/object/apply:os.system is no setting",
        ),
        ("a: !mine x", 1, "!mine is no setting"),
        ("a: &a [*a]", 1, "contains itself"),
        ("a: &a\n  b: *a", 1, "contains itself"),
        (BOMB, 6, "more than 100,000 values"),
        ("a: {" * 70, 1, "nested deeper"),
        ("- " * 70 + "x", 1, "nested deeper"),
        ("name: x\n<<: 3", 2, "it is no YAML: expected a mapping or list of mappings for merging"),
        ("a: *b", 1, "it is no YAML: found undefined alias"),
        ("a: [1\nb: 2", 2, "it is no YAML"),
        ("a: 1\nb: \x07", 2, "it is no YAML: special characters are not"),
        ("a: 1\n--- \nb: 2", 2, "it is no YAML: but found another document"),
    ],
)
def test_a_fault_is_one_line_with_its_place(tmp_path, text, line, words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        load_config(str(path))
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 500
    assert f"line {line}: " in message


def test_the_command_line_says_it_in_one_line(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("name: x\nseed: !!int x")
    assert cli.main(["train", str(path), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"{path}: line 2: 'x' is no int" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3",
        "a: &a {x: 1}\nb: &b {<<: *a, z: 2}\nc: {<<: *b, x: 5}\nd: {<<: [*a, *b], w: 1}",
        "b: {<<: {x: 1}, x: 2}\nc: {x: 2, <<: {x: 1, y: 4}}",
        "a: &a [1, 2]\nb: *a\nc: [*a, *a]",
        "a: &n\n  k: {<<: {x: 1}, x: 2}\nb: {<<: *n, l: *n}",
        "",
        "a: 1.5\nb: ~\nc: no\nd: 'no'\ne: |\n  x\n  y\nf: .5",
    ],
)
def test_anchors_and_merge_keys_are_those_of_yaml(text):
    assert parse_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text", ["x: {a: 1, a: 2}", "x: {<<: {a: 1}, <<: {b: 2}}", "x: {a: 1, 'a': 2}"]
)
def test_a_key_of_one_mapping_comes_once(text):
    with pytest.raises(ConfigError, match="is there twice, in the mapping of line 1"):
        parse_yaml(text)


def test_dates_are_texts_and_exponents_numbers():
    read = parse_yaml("a: 2024-02-29\nb: 1e-6\nc: 2024-01-01 10:00:00\nd: -1E5\ne: 1_000e2")
    assert read == {"a": "2024-02-29", "b": 1e-6, "c": "2024-01-01 10:00:00", "d": -1e5, "e": 1e5}


def test_a_configuration_with_merge_keys(tmp_path):
    path = tmp_path / "run.yaml"
    optim = "optim: {learning_rate: 1e-5}"
    merged = SHORT.replace(
        optim, "optim:\n    <<: &o {learning_rate: 1e-4, warmup_steps: 3}\n    learning_rate: 1e-5"
    )
    assert merged != SHORT
    path.write_text(merged)
    optim = load_config(str(path)).rl.optim
    assert (optim.learning_rate, optim.warmup_steps) == (1e-5, 3)
