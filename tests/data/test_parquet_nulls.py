"""Equal rows give equal prompts, references and conversations in JSONL and Parquet, although a
Parquet struct column has the union of all rows' fields.
"""

import json
from dataclasses import replace

import pyarrow
import pytest
from pyarrow import parquet
from tiny import MODEL

from compass_jax.config import DataConfig, FileSource, RunConfig, SFTConfig
from compass_jax.config.kinds import kinds
from compass_jax.data.files import read_rows
from compass_jax.data.questions import questions
from compass_jax.data.sft import conversations
from compass_jax.rewards.called import Case, called


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties][:1]}
    function = {"name": name, "description": name, "parameters": schema}
    return {"type": "function", "function": function}


def user(text):
    return {"role": "user", "content": text}


CITY, NUMBER = {"type": "string", "enum": ["Paris"]}, {"type": "integer", "minimum": 0}
TOOLS = [[tool("weather", city=CITY)], [tool("add", a=NUMBER, b=NUMBER)], [tool("now")]]
CALLS = [[call("weather", city="Paris")], [call("add", a=1, b=2)], [call("now")]]
TURNS = [
    [
        user(f"question {i}"),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": one}]},
        {"role": "tool", "content": "3", "tool_call_id": f"x{i}"},
        user("and then?"),
    ]
    for i, (one,) in enumerate(CALLS)
]


def rows_of(**columns):
    """Returns rows with these columns, and a default prompt and answer in each."""
    count = len(next(iter(columns.values())))
    usual = {"prompt": [f"question {i}" for i in range(count)], "answer": ["3"] * count}
    return [
        {name: values[i] for name, values in {**usual, **columns}.items()} for i in range(count)
    ]


SHAPES = {
    "tool schemas": rows_of(answer=CALLS, tools=TOOLS),
    "messages with calls": rows_of(prompt=TURNS),
    "nested structs in lists": rows_of(
        answer=[
            [call("plan", steps=[{"do": "go", "to": {"x": 1}}, {"do": "stop"}])],
            [call("plan", steps=[{"wait": {"until": {"hour": 3}}}, {}])],
            [call("plan", steps=[])],
        ]
    ),
    "empty structs": rows_of(answer=[[call("f")], [call("f", a={})], [call("f", a={"b": 1})]]),
    "explicit nulls": rows_of(
        answer=[[call("f", a=None, b=[None, 1])], [call("f", b=[2])], [call("f", a="x")]],
        tools=[
            [tool("f", a={"type": "string", "default": None})],
            [tool("f", b={"type": "array"})],
            [tool("f", a={"default": "x"})],
        ],
    ),
    "a JSON schema": rows_of(
        schema=[{"properties": {"a": CITY}}, {"properties": {"b": NUMBER}}, {"type": "object"}]
    ),
    "verl": [
        {
            "prompt": [user(f"question {i}")],
            "reward_model": {"style": "rule", "ground_truth": one},
            "extra_info": {"index": i, **({"hint": "h"} if i else {})},
        }
        for i, one in enumerate(CALLS)
    ],
}


def write_both(folder, rows):
    """Writes the rows as a JSONL and as a Parquet file; returns both paths."""
    folder.mkdir()
    plain, table = folder / "rows.jsonl", folder / "rows.parquet"
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    return str(plain), str(table)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_the_same_questions_in_both_formats(tmp_path, shape):
    verifier = f"{__file__}:score"
    pools = [
        questions(DataConfig(sources=(FileSource(path, verifier=verifier),)), 0)
        for path in write_both(tmp_path / "rows", SHAPES[shape])
    ]
    assert len(pools[0]) == len(SHAPES[shape])
    for plain, table in zip(*pools, strict=True):
        if shape == "explicit nulls":  # JSONL keeps the nulls of a column that is not read
            plain, table = replace(plain, row=""), replace(table, row="")
        assert plain == table
    assert "null" not in str([question.answer for question in pools[1]]).replace("[null, 1]", "")


def score(response):
    return 1.0


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "verl"])
def test_rows_are_the_same_conversations_in_both_formats(tmp_path, shape):
    rows = []
    for row in SHAPES[shape]:
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [user(row["prompt"])]
        reply = {"role": "assistant", "content": "fine"}
        if isinstance(row["answer"], list):
            reply["tool_calls"] = row["answer"]
        rows.append({"messages": [*prompt, reply], "tools": row.get("tools", [])})
    by_file = []
    for path in write_both(tmp_path / "rows", rows):
        config = RunConfig("rows", MODEL, sft=SFTConfig(files=(path,)))
        found = conversations(config.sft, config.data.system_prompt, print)
        by_file.append([(x.messages, x.tools) for x in found])
    assert by_file[0] == by_file[1]


@pytest.mark.parametrize("n", range(3))
def test_the_right_call_scores_1_beside_rows_with_other_arguments(tmp_path, n):
    """A bug report had this input: `weather`'s reference got the arguments a and b, both null."""
    for path in write_both(tmp_path / "rows", SHAPES["tool schemas"]):
        data = DataConfig(sources=(FileSource(path, verifier="tools"),))
        row = json.loads(questions(data, 0)[n].row)
        one = CALLS[n][0]
        verdict = kinds()["tools"].judge(json.dumps(one), row["answer"], "", row["tools"])
        assert verdict == {"reward": 1.0, "name": 1.0, "arguments": 1.0}


def test_a_map_is_an_object_and_keeps_its_null_values(tmp_path):
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct([("x", pyarrow.int64())]))
    values = [[("a", {"x": 1}), ("b", None)], [("c", {})], [], None]
    table = pyarrow.table({"prompt": ["p"] * 4, "m": pyarrow.array(values, kind)})
    parquet.write_table(table, tmp_path / "maps.parquet")
    rows = [row["m"] for _, row in read_rows(str(tmp_path / "maps.parquet"), {}, None)]
    assert rows == [{"a": {"x": 1}, "b": None}, {"c": {}}, {}, None]


def test_null_arguments_count_as_absent_in_calls_of_tools():
    judge = kinds()["tools"].judge
    reference = [{"name": "f", "arguments": {"a": 1, "unit": None, "at": {"x": 1, "y": None}}}]
    for arguments, reward in (
        ({"a": 1, "at": {"x": 1}}, 1),
        ({"a": 1, "unit": None, "at": {"x": 1, "y": None}}, 1),
        ({"a": 1, "unit": "C", "at": {"x": 1}}, 0),
        ({"a": None, "at": {"x": 1}}, 0),
        ({"a": 1, "at": {"x": 1, "y": 2}}, 0),
    ):
        answer = json.dumps({"name": "f", "arguments": arguments})
        assert judge(answer, reference, "")["reward"] == reward


def test_null_fields_count_as_absent_in_json_unless_the_reference_is_text():
    judge = kinds()["json"].judge
    answer = '{"name": "Al", "age": null}'
    assert judge(answer, "", {"name": "Al"})["reward"] == 1
    assert judge(answer, "", {"name": "Al", "age": 3})["reward"] == 0
    assert judge(answer, "", answer)["reward"] == 1
    assert judge('{"name": "Al"}', "", answer)["reward"] == 0
    assert judge("[null]", "", [])["reward"] == 0


def test_a_null_column_leaves_a_parameter_at_its_default():
    def tolerant(response, answer, hint, limit=0.5, factor=2):
        return [answer, hint, limit, factor]

    function = called(tolerant, "here", {"factor": 3}, "")
    row = {"answer": 1, "hint": None, "limit": None, "factor": None}
    assert function([Case(row, "")]) == [[1, None, 0.5, 3]]
    assert function([Case({**row, "limit": 0.0}, "")]) == [[1, None, 0.0, 3]]
