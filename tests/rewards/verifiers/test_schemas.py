"""JSON schemas: hostile answers are wrong in bounded time, faults of a schema are found first."""

import json
import time

import pytest
from test_usual import RIGHT, WRONG, judged

from compass_jax.config import ConfigError, DataConfig, FileSource
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.rewards.checks import Check, build

OBJECTS = [{"a": n, "b": [n]} for n in range(4000)]
EVIL = "a" * 40 + "!"


@pytest.mark.parametrize(
    ("schema", "answer", "valid"),
    [
        ({"uniqueItems": True}, OBJECTS, 1),
        ({"uniqueItems": True}, [*OBJECTS, {"b": [3.0], "a": 3}], 0),
        ({"uniqueItems": True}, [[n, {}] for n in range(9000)], 1),
        ({"uniqueItems": True}, [1, True, "1", [1], [True], {"a": 1}, {"a": True}], 1),
        ({"uniqueItems": True}, [1, 1.0], 0),
        ({"uniqueItems": True}, [{"a": None}, {}], 1),
        ({"uniqueItems": False}, [1, 1], 1),
        ({"properties": {"x": {"uniqueItems": True}}}, {"x": OBJECTS * 2}, 0),
        ({"pattern": "^(a+)+$"}, EVIL, 0),
        ({"pattern": "^(a+)+$"}, "aaa", 1),
        ({"patternProperties": {"^(a|a)*$": {}}}, {EVIL: 1}, 0),
        ({"items": {"pattern": "(x+x+)+y"}}, ["x" * 40, "x" * 41], 0),
        ({"propertyNames": {"pattern": r"^(\\w+\\s?)*$"}}, {"a" * 40 + "!": 1}, 0),
    ],
)
def test_an_answer_is_judged_in_bounded_time(schema, answer, valid):
    start = time.process_time()
    result = build(Check("json"), "answer")({"schema": schema}, json.dumps(answer))
    assert result.reward == result.components["valid"] == valid
    assert time.process_time() - start < 5


def test_a_pattern_that_an_answer_makes_slow_is_not_found():
    assert judged("regex", EVIL, pattern="^(a+)+$") == WRONG
    assert judged("regex", "aaa", pattern="^(a+)+$") == RIGHT


FAULTS = [
    ({"$ref": "#"}, "refers to itself without an end"),
    ({"anyOf": [{"$ref": "#"}]}, "refers to itself without an end"),
    ({"$ref": "http://localhost/x"}, "cannot be found; include the schema"),
    ({"pattern": "("}, r"the pattern '\(' is none of Python's"),
    ({"items": {"patternProperties": {"[z-a]": {}}}}, "is none of Python's: bad character range"),
    ({"type": "nix"}, "'nix' is not valid"),
    (5, "a int; it must be an object"),
    ("{", "not JSON"),
]


@pytest.mark.parametrize(("schema", "message"), FAULTS)
def test_a_schema_is_refused_in_the_setting_and_in_a_row(tmp_path, schema, message):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(ConfigError, match=f"schema = .*{message}"):
        FileSource("r.jsonl", verifier="json", verifier_args={"schema": text}).validate("s")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Q?", "schema": schema}) + "\n")
    source = FileSource(str(path), verifier="json", answer_field="")
    with pytest.raises(DataError, match=f"line 1.*its schema: .*{message}"):
        questions(DataConfig(sources=(source,)), 0, print)


def test_a_property_may_be_called_pattern():
    schema = {"properties": {"pattern": {"type": "string"}}}
    assert build(Check("json"), "answer")({"schema": schema}, '{"pattern": "("}').reward == 1
