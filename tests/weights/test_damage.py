"""Damaged checkpoints are detected before any of their data is used, and the newest sound one is
used instead.
"""

import json
import logging
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract import abstract_like
from forged import edit_manifest

from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.devices import distributed
from compass_jax.training.session import newest_checkpoint
from compass_jax.weights import checkpoint, digests, manifest, sound, writer
from compass_jax.weights.checkpoint import CheckpointError

MODEL = ModelConfig("qwen3_moe", 100, 32, 2, 2, 1, 16, 64, moe=MoEConfig(8, 2, 32))


def tree(step=0):
    draw = np.random.default_rng(step)
    return {
        "w": jnp.asarray(draw.normal(size=(64, 48)), jnp.bfloat16),
        "m": jnp.asarray(draw.normal(size=(64, 48)), jnp.float32),
        "step": jnp.int32(step),
        "none": jnp.zeros((0, 4)),
    }


def save(run, step, keep=9):
    return checkpoint.save(
        run, step, tree(step), {"at": step, "none": [None]}, model=MODEL, keep=keep
    )


def restore(path, step=None):
    return checkpoint.restore(path, abstract_like(tree()), step, model=MODEL)


def files_of(where):
    return sorted(path for path in where.rglob("*") if path.is_file())


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def largest(where):
    return max(files_of(where), key=lambda file: file.stat().st_size)


def damage(where):
    flip(largest(where), 8 * 1000)


AFTERWARDS = ("_CHECKPOINT_METADATA", "commit_success.txt")


@pytest.fixture
def run(tmp_path):
    """Returns a run directory with checkpoints of steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed(tmp_path, flips):
    """Three bits are flipped in each file, and the others in proportion to the files' sizes. For
    one flip in ten restore itself detects the damage. The files that orbax adds after the digests
    are never read.
    """
    where = save(tmp_path, 1)
    files = [file for file in files_of(where) if file.name not in AFTERWARDS]
    assert len(files) > 10 and files[-1].name == "meta.json" and files[-2].name == "manifest.json"
    sizes = np.array([file.stat().st_size for file in files], np.float64)
    draw = np.random.default_rng(16)
    drawn = draw.choice(len(files), flips - 3 * len(files), p=sizes / sizes.sum())
    chosen = [*(i for i in range(len(files)) for _ in range(3)), *drawn]
    unnoticed = []
    for count, i in enumerate(chosen):
        bit = int(draw.integers(8 * sizes[i]))
        flip(files[i], bit)
        report = sound.examine(where)
        if not report.faults:
            unnoticed.append((files[i].name, bit))
        if count % 10 == 0:
            with pytest.raises(CheckpointError, match="is damaged"):
                restore(tmp_path)
        flip(files[i], bit)
    assert len(chosen) == flips and unnoticed == []
    assert sound.examine(where).faults == [] and restore(tmp_path)[0] == 1


def swap(name):
    def apply(run):
        other, target = (
            run / "checkpoints" / "step_00000002" / name,
            run / "checkpoints" / "step_00000003" / name,
        )
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        shutil.copytree(other, target) if other.is_dir() else shutil.copy(other, target)

    return apply


def at_newest(change):
    return lambda run: change(run / "checkpoints" / "step_00000003")


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def rename(run):
    shutil.rmtree(run / "checkpoints" / "step_00000003")
    (run / "checkpoints" / "step_00000002").rename(run / "checkpoints" / "step_00000003")


@pytest.mark.parametrize(
    "change,message",
    [
        (at_newest(lambda where: largest(where).unlink()), r"arrays/.* is missing"),
        (
            at_newest(lambda where: (where / "arrays" / "d" / "more").write_text("")),
            r"arrays/d/more was not written with it",
        ),
        (
            at_newest(lambda where: largest(where).write_bytes(b"x" * 77)),
            r"has 77 bytes, [\d,]+ were written",
        ),
        (
            at_newest(lambda where: (where / "meta.json").write_text('{"at": 2, "none": [null]}')),
            r"meta.json was changed after",
        ),
        (at_newest(lambda where: (where / "meta.json").unlink()), r"meta.json is missing"),
        (
            at_newest(lambda where: pipe(where / "meta.json")),
            r"meta.json is no file: a folder, a pipe",
        ),
        (at_newest(lambda where: pipe(largest(where))), r"arrays/.* is no file: a folder, a pipe"),
        (at_newest(lambda where: pipe(where / "manifest.json")), r"manifest.json is not a file"),
        (
            at_newest(lambda where: (where / "manifest.json").unlink()),
            r"manifest.json does not exist",
        ),
        (
            at_newest(lambda where: shutil.rmtree(where / "arrays")),
            r"arrays/_METADATA is missing; .* and \d more",
        ),
        (
            at_newest(lambda where: edit_manifest(where, lambda x: x | {"step": 2})),
            r"manifest is of step 2, the directory's name of step 3",
        ),
        (swap("arrays"), r"arrays/.* is missing; .*and \d+ more"),
        (swap("meta.json"), r"meta.json was changed after it was written"),
        (swap("manifest.json"), r"its manifest is of step 2, the directory's name of step 3"),
        (rename, r"its manifest is of step 2, the directory's name of step 3"),
    ],
)
def test_what_is_not_as_it_was_written_is_named_and_an_older_one_used(run, caplog, change, message):
    change(run)
    with pytest.raises(CheckpointError, match=f"step_00000003 is damaged: .*{message}"):
        restore(run, 3)
    with pytest.raises(CheckpointError, match=f"step_00000003 is damaged: .*{message}"):
        restore(run / "checkpoints" / "step_00000003")
    expected_step = 1 if change is rename else 2
    with caplog.at_level(logging.WARNING):
        step, arrays, meta = restore(run)
    assert step == expected_step and meta["at"] == expected_step
    np.testing.assert_array_equal(arrays["m"], tree(expected_step)["m"])
    (warning,) = caplog.messages
    assert (
        re.search(f"step_00000003 is damaged and was passed over: .*{message}", warning)
        and f"going on from step_0000000{expected_step}" in warning
    )


def test_where_all_are_damaged_all_are_named(run):
    for step in (1, 2, 3):
        damage(run / "checkpoints" / f"step_0000000{step}")
    with pytest.raises(
        CheckpointError,
        match=r"(?s)00000003 is damaged.*00000001 is damaged.*no sound checkpoint is left",
    ):
        restore(run)
    assert len(list((run / "checkpoints").iterdir())) == 3


def test_a_resumed_run_keeps_damaged_ones_under_another_name(run):
    notices = []
    assert newest_checkpoint(str(run), notices.append).manifest.step == 3 and notices == []
    for name in ("damaged_step_00000003", "damaged_step_00000003_2"):
        damage(run / "checkpoints" / "step_00000003")
        newest = newest_checkpoint(str(run), notices.append)
        assert newest.path.name == "step_00000002" and newest.meta() == {"at": 2, "none": [None]}
        assert notices[-1].endswith(f"checkpoints/{name}: remove it when nobody needs it")
        assert sound.examine(run / "checkpoints" / name).faults
        save(run, 3)  # saves a new checkpoint under the old name
    assert checkpoint.latest(run) == 3 and restore(run)[0] == 3


def test_the_only_one_is_never_renamed_nor_taken_for_none(run):
    for step in (1, 2):
        shutil.rmtree(run / "checkpoints" / f"step_0000000{step}")
    (run / "checkpoints" / "step_00000003" / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"step_00000003 is damaged: .*manifest.json does not exist\nit is the only one there",
    ):
        newest_checkpoint(str(run), print)
    assert (run / "checkpoints" / "step_00000003").is_dir()


def test_damaged_ones_are_not_counted_and_go_with_older_ones(run):
    for step in (2, 3):
        (run / "checkpoints" / f"step_0000000{step}" / "meta.json").unlink()
    save(run, 4, keep=2)
    assert list(sound.steps(run)) == [1, 2, 3, 4]
    save(run, 5, keep=2)
    assert list(sound.steps(run)) == [4, 5]
    assert restore(run)[0] == 5


def test_of_several_processes_each_digests_its_share_and_all_decide_alike(tmp_path, monkeypatch):
    where = save(tmp_path, 1)
    listed = manifest.read(where).files
    shares = []
    for number in range(3):
        place = lambda number=number: (number, 3)  # noqa: E731
        monkeypatch.setattr(distributed, "process_index_and_count", place)
        shares.append(set(sound._share(listed)))
    assert (
        set.union(*shares) == set(listed) and sum(map(len, shares)) == len(listed) and all(shares)
    )
    of_three = {
        f"arrays/ocdbt.process_{i}/{name}": digests.Digest(1, "") for i in range(3) for name in "ab"
    }
    monkeypatch.setattr(distributed, "process_index_and_count", lambda: (2, 3))
    expected = [f"arrays/ocdbt.process_2/{name}" for name in "ab"]
    assert list(sound._share(listed | of_three)) == expected
    monkeypatch.setattr(
        distributed,
        "all_gather_bytes",
        lambda payload: [b"[]", json.dumps(["another found this"]).encode(), payload],
    )
    assert sound.examine(where).faults == ["another found this"]


def test_a_digest_is_that_of_the_bytes_whatever_the_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "PIECE", 1000)
    data = np.random.default_rng(0).bytes(3500)
    contents = {"empty": b"", "short": data[:10], "one": data[:1000], "many": data}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    actual = digests.of_files(tmp_path, contents)
    assert actual == {name: digests.of_bytes(content) for name, content in contents.items()}
    assert len({digest.value for digest in actual.values()}) == 4 and actual["many"].size == 3500


def test_of_several_processes_each_digests_what_it_wrote(tmp_path, monkeypatch):
    arrays = save(tmp_path, 1) / "arrays"
    shutil.copytree(arrays / "ocdbt.process_0", arrays / "ocdbt.process_1")
    paths = {str(file.relative_to(arrays)) for file in files_of(arrays)}
    shares = []
    for number in range(2):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        writer._digest_own_files(arrays)
        shares.append(json.loads((arrays / f"digests.{number}.json").read_text()))
    assert all(len(share) >= 3 for share in shares)
    for number, share in enumerate(shares):
        assert all(name.startswith(f"ocdbt.process_{number}/") for name in share)
    actual = writer._all_digests(arrays)
    assert set(actual) == paths == {str(file.relative_to(arrays)) for file in files_of(arrays)}
    assert actual == digests.of_files(arrays, sorted(paths))
