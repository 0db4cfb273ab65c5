"""Rows of a file by number: the same rows as in sequential reading, in every format, and a
DataError with the place if a file or a row cannot be read.
"""

import gzip
import json
import os
import random
import re
import tracemalloc

import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from compass_jax.config import ConfigError, DataConfig, FileSource
from compass_jax.data.files import DataError, FileRows, files_of, label_of, read_rows, row_of
from compass_jax.data.questions import questions

FIELDS = {"messages": "add it"}


def row(number, reply="yes"):
    return {
        "messages": [{"role": "user", "content": f"q{number}"}, {"role": "x", "content": reply}]
    }


def lines_of(rows):
    return [json.dumps(one).encode() + b"\n" for one in rows]


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def write(path, rows):
    """Writes rows in the format of the name's ending."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
        return str(path)
    return write_lines(path, lines_of(rows))


def write_lines(path, lines):
    """Writes lines, or records; a compressed file has two frames."""
    if path.suffix == ".arrayrecord":
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for line in lines:
            writer.write(line.removesuffix(b"\n"))
        writer.close()
        return str(path)
    halves = [b"".join(lines[: len(lines) // 2]), b"".join(lines[len(lines) // 2 :])]
    pack = {".gz": gzip.compress, ".zst": zstd, ".jsonl": bytes}[path.suffix]
    path.write_bytes(b"".join(pack(half) for half in halves))
    return str(path)


def opened(path, cache):
    return FileRows(str(path), FIELDS, (), str(cache))


ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrayrecord")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_row_by_its_number_is_the_row_that_reading_in_order_finds(tmp_path, ending):
    path = write(tmp_path / f"a{ending}", [row(n, "x" * (n * 7 % 100)) for n in range(40)])
    expected = list(read_rows(path, FIELDS))
    assert [one["messages"][0]["content"] for _, one in expected] == [f"q{n}" for n in range(40)]
    word = {".parquet": "row", ".arrayrecord": "record"}.get(ending, "line")
    assert expected[4][0] == f"{path}, {word} 5"
    rows = opened(path, tmp_path / "cache")
    assert len(rows) == 40
    order = random.Random(1).sample(range(40), 40)
    actual = [(where, row_of(where, raw, FIELDS)) for where, raw in map(rows.__getitem__, order)]
    assert actual == [expected[n] for n in order]


@pytest.mark.parametrize("cut", [False, True], ids=["with its end", "without"])
def test_lines_begin_where_the_one_before_ends(tmp_path, cut):
    rng = random.Random(0)
    lines = [b'{"a": %d}' % n + rng.choice([b"\n", b"\n\n", b"\r\n"]) for n in range(70_000)]
    content = b"".join(lines)
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.rstrip() if cut else content)
    expected = path.read_bytes().splitlines(keepends=True)
    rows = opened(path, tmp_path / "cache")
    assert len(rows) == len(expected)
    places = [0, 1, 2**16 - 1, 2**16, len(rows) - 1, *rng.sample(range(len(rows)), 100)]
    assert [rows[n][1] for n in places] == [expected[n] for n in places]


@pytest.mark.parametrize("ending", ENDINGS[:4])
def test_the_cache_serves_this_version_of_the_file_alone(tmp_path, ending):
    path = write(tmp_path / f"a{ending}", [row(n) for n in range(20)])
    cache = tmp_path / "cache"
    first = opened(path, cache)
    mtimes = {x: x.stat().st_mtime_ns for x in cache.iterdir()}
    assert opened(path, cache)[3] == first[3]
    assert {x: x.stat().st_mtime_ns for x in cache.iterdir()} == mtimes
    assert {x.suffix for x in mtimes} <= {".lines", ".lock", ".jsonl"}
    os.utime(path, ns=(1, 1))  # another modification time: the cache may be of other content
    reopened = opened(path, cache)
    assert len(list(cache.iterdir())) > len(mtimes)
    assert reopened.key == first.key  # the same content, for a resumed run
    write(tmp_path / f"a{ending}", [row(n, "no") for n in range(20)])
    assert opened(path, cache).key != first.key


@pytest.mark.parametrize("ending", [".jsonl", ".arrayrecord"])
@pytest.mark.parametrize("change", ["longer", "touched", "gone"])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, ending, change):
    path = tmp_path / f"a{ending}"
    write(path, [row(n) for n in range(9)])
    rows = opened(path, tmp_path / "cache")
    if change == "longer":
        path.write_bytes(path.read_bytes() + lines_of([row(9)])[0])
    elif change == "touched":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    message = "does not exist" if change == "gone" else "has changed while it was read"
    with pytest.raises(DataError, match=re.escape(str(path)) + " " + message):
        rows[0]


GOOD = lines_of([row(0), row(1)])
LONG = lines_of([row(0, "x" * 10 * 2**20)])[0]
PACKED = {".gz": gzip.compress(b"".join(GOOD) * 500), ".zst": zstd(b"".join(GOOD) * 500)}
FILES = {
    "empty": (".jsonl", b"", "is empty"),
    "empty gz": (".jsonl.gz", b"", "is empty"),
    "empty parquet": (".parquet", b"", "cannot be read"),
    "empty arrayrecord": (".arrayrecord", b"", "cannot be read"),
    "half-written": (".jsonl", GOOD[0] + GOOD[1][:-9], "line 2: the last line is cut off"),
    "half a parquet": (".parquet", b"PAR1" + bytes(99), "cannot be read"),
    "half an arrayrecord": (".arrayrecord", os.urandom(70_000), "cannot be read"),
    "half a gz": (".jsonl.gz", PACKED[".gz"][:-40], "cannot be read .*cut off, damaged"),
    "half a zst": (".jsonl.zst", PACKED[".zst"][:-20], "cannot be read .*cut off, damaged"),
    "no gz": (".jsonl.gz", b"".join(GOOD), "cannot be read .*not of the kind that its name says"),
    "no zst": (".jsonl.zst", b"".join(GOOD), "cannot be read .*not of the kind that its name says"),
    "missing": (".jsonl", None, "does not exist"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_refused_when_it_is_opened(tmp_path, name):
    ending, content, message = FILES[name]
    path = tmp_path / f"a{ending}"
    if content is not None:
        path.write_bytes(content)
    for read in (
        lambda: opened(path, tmp_path / "cache"),
        lambda: list(read_rows(str(path), {})),
        lambda: list(read_rows(str(path), FIELDS, (), lambda error: None)),
    ):
        with pytest.raises(DataError, match=re.escape(str(path)) + f".*{message}"):
            read()
    assert not list(tmp_path.glob("cache/tmp*"))


ROWS = {
    "binary": (bytes(range(256)), "not UTF-8|not JSON"),
    "latin-1": (b'{"messages": ["caf\xe9"]}', "not UTF-8"),
    "utf-16": ('{"messages": 1}'.encode("utf-16-le"), "not JSON|not UTF-8"),
    "a lone surrogate": (b'{"messages": ["\\ud800"]}', "half a character"),
    "10 MB": (LONG[:-1], "more than 8,388,608 bytes"),
    "no field": (b'{"text": 1}', "no field 'messages'"),
}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".arrayrecord"])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_cannot_be_used_is_named_where_it_lies_and_the_others_are_read(
    tmp_path, name, ending
):
    content, message = ROWS[name]
    path = tmp_path / f"a{ending}"
    write_lines(path, [GOOD[0], content.replace(b"\n", b"") + b"\n", GOOD[1]])
    word = "record" if ending == ".arrayrecord" else "line"
    place = re.escape(f"{path}, {word} 2: ") + f".*({message})"
    with pytest.raises(DataError, match=place):
        list(read_rows(str(path), FIELDS))
    problems = []
    assert len(list(read_rows(str(path), FIELDS, (), problems.append))) == 2
    assert len(problems) == 1 and re.match(place, str(problems[0]))
    rows = opened(path, tmp_path / "cache")
    pairs = [rows[n] for n in range(3)]
    assert row_of(*pairs[0], FIELDS) == row(0) and row_of(*pairs[2], FIELDS) == row(1)
    with pytest.raises(DataError, match=place):
        row_of(*pairs[1], FIELDS)


def test_a_damaged_record_is_named(tmp_path):
    path = tmp_path / "a.arrayrecord"
    write(path, [row(n) for n in range(300)])
    content = bytearray(path.read_bytes())
    content[3000] ^= 0xFF
    path.write_bytes(content)
    rows = opened(path, tmp_path / "cache")
    with pytest.raises(DataError, match=r"a\.arrayrecord, record \d+: cannot be read"):
        for n in range(300):
            rows[n]
    with pytest.raises(DataError, match=r"a\.arrayrecord, after record 0: cannot be read"):
        list(read_rows(str(path), FIELDS))


def test_a_cache_folder_that_cannot_be_written_is_named_with_the_setting(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(0)])
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cache.*cannot be written.*data\.cache"):
        opened(path, tmp_path / "cache")


def test_memory_holds_a_part_of_the_file_alone(tmp_path):
    """A file of 24 MiB is indexed and read with less than 12 MiB."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_of([row(0, "x" * 4000)])[0] * 6_200)
    tracemalloc.start()
    try:
        rows = opened(path, tmp_path / "cache")
        for start in range(0, 6_000, 300):
            assert all(rows[n] for n in range(start, start + 60))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(rows) == 6_200 and os.path.getsize(path) > 24 * 2**20 and peak < 12 * 2**20


def test_prompts_of_rl_come_from_a_folder_of_files_of_every_kind(tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    for number, ending in enumerate(ENDINGS):
        write(folder / f"{number}{ending}", [{"prompt": f"{number} + 1?", "answer": number + 1}])
    source = FileSource(str(folder))
    source.validate("data.sources[0]")
    pool = questions(DataConfig(sources=(source,)), 0, lambda line: None)
    assert [(one.text, one.answer) for one in pool] == [(f"{n} + 1?", str(n + 1)) for n in range(5)]
    assert {one.label for one in pool} == {"prompts"}
    with pytest.raises(ConfigError, match=r"\.csv'.*must end in \.jsonl, \.jsonl\.gz.*a folder"):
        FileSource("rows.csv").validate("data.sources[0]")


def test_a_folder_is_the_files_of_rows_in_it(tmp_path):
    for name in ("b.jsonl", "deep/a.parquet", "c.jsonl.gz", "README.md", "d.csv", "[e].jsonl.zst"):
        (tmp_path / "chats" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "chats" / name).touch()
    folder = f"{tmp_path}/chats"
    paths = [os.path.relpath(path, folder) for path in files_of(folder)]
    assert paths == ["[e].jsonl.zst", "b.jsonl", "c.jsonl.gz", "deep/a.parquet"]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"none is a folder without a file of rows: .*\.parquet"):
        files_of(f"{tmp_path}/none")
    names = ("d/chats/", "d/chats", "a.jsonl.gz", "d/a.b.parquet", "d/part-*.jsonl.zst")
    assert [label_of(name) for name in names] == ["chats", "chats", "a", "a.b", "part"]
    here = os.path.basename(os.getcwd())
    assert [label_of(name) for name in ("d/v1.5/", "v1.6/", "./")] == ["v1.5", "v1.6", here]
