"""Faults of checkpoints: bits, bytes, the manifest, meta.json, files that are moved or missing.
The run has steps 2 and 3 on its disk.

Doors: `train` on the run again (it restores everything), `export-hf` of the run and of one
checkpoint (it restores the weights). Accepted may be the newest checkpoint, equal to the
undisturbed one in every array and in meta.json; or, with the damaged one named, the one before
it. A fresh start, or the older one without a word, has lost what was there; so has a command that
removes a sound checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from . import spies
from .strict import (
    ODD_TEXTS,
    ODD_VALUES,
    damage_bytes,
    damage_json,
    odd_encoding,
    paths_of,
    with_path,
    with_text,
)
from .words import CLEAR, GOOD, HARMLESS, LOST, Ended, Expected, Verdict, first, judge, squeezed
from .world import CONFIG, Case, read_safetensors

SHARE = 11
STEPS = ["--rl.steps", "3", "--rl.save-every", "1", "--rl.prompts-per-step", "2"]
NEWEST, OLDER = "step_00000003", "step_00000002"


def run(case: Case) -> Verdict:
    """One fault of the newest checkpoint."""
    world = case.world.made("trained", ["train", CONFIG, *STEPS])
    case.bring("rows.jsonl", "tokenizer", "run", source=world)
    root = case.folder / "run" / "checkpoints"
    names = _damage(case, root)
    sound = {name: _digest(root / name) for name in (NEWEST, OLDER) if (root / name).is_dir()}
    door = case.rng.choice(["train", "train", "export", "one"])
    verdict = {"train": _train, "export": _export, "one": _one}[door](case, [*names, NEWEST])
    after = {name: _digest(root / name) for name in sound if (root / name).is_dir()}
    gone = [name for name in sound if name == OLDER and after.get(name) != sound[name]]
    if gone and verdict.word in GOOD:
        return Verdict(LOST, f"{gone[0]} was sound and is gone or changed")
    return verdict


def _digest(folder: Path) -> str:
    made = hashlib.sha256()
    for file in sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    ):
        made.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return made.hexdigest()


def _outcomes(case: Case, name: str, argv: list[str], read: Any) -> dict[str, Any]:
    """The undisturbed outcomes of a door: with all checkpoints, and with the older one alone."""
    found = {}
    for kept in (NEWEST, OLDER):
        file = case.world.folder / "runs" / f"{name}_{kept}.json"
        if not file.exists():
            folder = case.folder / f"undisturbed_{kept}"
            folder.mkdir()
            other = Case(case.seed, case.index, case.area, folder, case.world)
            other.bring(
                "rows.jsonl", "tokenizer", "run", source=case.world.folder / "runs" / "trained"
            )
            if kept == OLDER:
                shutil.rmtree(folder / "run" / "checkpoints" / NEWEST)
            ended = read(
                other,
                other.compass(
                    argv, spies.restored if argv[0] == "train" else None, seconds=120, cpu_s=120
                ),
            )
            assert ended.status == 0, f"undisturbed {argv}: {ended.err[-2000:]}"
            made = file.with_name(f".{file.name}.{os.getpid()}")
            made.write_text(json.dumps(ended.outcome))
            made.rename(file)
        found[kept] = json.loads(file.read_text())
    return found


def _judge(ended: Ended, found: dict[str, Any], names: list[str]) -> Verdict:
    verdict = judge(ended, Expected(list(found.values()), names))
    if verdict.word != HARMLESS:
        return (
            Verdict(LOST, "a fresh start beside checkpoints")
            if ended.status == 0 and ended.outcome == "a fresh start"
            else verdict
        )
    if ended.outcome == found[NEWEST]:
        return verdict
    said = squeezed(ended.out + ended.err)
    named = any(squeezed(name) in said for name in (*names, "step 3"))
    if (
        "step_00000001" in names
    ):  # what was renamed to an earlier step is not looked at: the newest by name is sound
        return verdict
    told = next(
        (
            line
            for line in (ended.out + "\n" + ended.err).splitlines()
            if any(name in line for name in names)
        ),
        "",
    )
    return (
        Verdict(CLEAR, first(told))
        if named
        else Verdict(LOST, "an older checkpoint was used and the damaged one not named")
    )


def _same(case: Case, ended: Ended) -> Ended:
    return ended


def _exported(case: Case, ended: Ended) -> Ended:
    if ended.status != 0:
        return ended
    found = {
        "tensors": read_safetensors(case.folder / "out"),
        "config": json.loads((case.folder / "out" / "config.json").read_text()),
    }
    return Ended(0, ended.out, ended.err, ended.timed_out, found, ended.seconds)


def _train(case: Case, names: list[str]) -> Verdict:
    argv = ["train", CONFIG, *STEPS]
    case.tell("train")
    found = _outcomes(case, "restored", argv, _same)
    return _judge(case.compass(argv, spies.restored), found, names)


def _export(case: Case, names: list[str]) -> Verdict:
    argv = ["export-hf", "run", "out"]
    case.tell("export-hf run")
    found = _outcomes(case, "exported", argv, _exported)
    return _judge(_exported(case, case.compass(argv)), found, names)


def _one(case: Case, names: list[str]) -> Verdict:
    """The damaged checkpoint by its own name: no other one may be taken for it."""
    where = f"run/checkpoints/{NEWEST}"
    if not (case.folder / where).exists():
        return _export(case, names)
    case.tell("export-hf of this checkpoint")
    found = _outcomes(case, "exported", ["export-hf", "run", "out"], _exported)
    ended = _exported(case, case.compass(["export-hf", where, "out"]))
    return judge(ended, Expected([found[NEWEST]], names))


# ---- damage ------------------------------------------------------------------------------------


def _damage(case: Case, root: Path) -> list[str]:
    """Damages the newest checkpoint; the names of which an error has to say one."""
    rng, folder = case.rng, root / NEWEST
    files = [path for path in folder.rglob("*") if path.is_file()]
    kind = rng.choice(
        ["bit"] * 6
        + ["bytes"] * 4
        + ["manifest"] * 4
        + ["meta"] * 4
        + ["file"] * 4
        + ["swap"] * 3
        + ["directory"] * 3
    )
    if kind in ("bit", "bytes"):
        size = [max(file.stat().st_size, 1) for file in files]
        file = rng.choices(files, size if rng.random() < 0.6 else None)[0]
        data = file.read_bytes()
        if kind == "bit" and data:
            at, bit = rng.randrange(len(data)), rng.randrange(8)
            data, told = (
                data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :],
                f"bit {bit} of byte {at} of {len(data)} flipped",
            )
        else:
            data, told = damage_bytes(data or b"x", rng)
        file.write_bytes(data)
        case.tell(f"{file.relative_to(root)}: {told}")
        return [file.name]
    if kind in ("manifest", "meta"):
        return _json(case, folder / f"{kind}.json")
    if kind == "file":
        return _file(
            case, root, rng.choice([*files, folder / "manifest.json", folder / "meta.json"])
        )
    if kind == "swap":
        name = rng.choice(["meta.json", "manifest.json", "arrays"])
        case.tell(f"{NEWEST}/{name} is that of step 2")
        target = folder / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        (shutil.copytree if name == "arrays" else shutil.copy)(root / OLDER / name, target)
        return [name]
    return _directory(case, root, folder)


def _json(case: Case, file: Path) -> list[str]:
    rng, raw = case.rng, json.loads(file.read_text())
    kind = rng.choice(["json"] * 5 + ["encoding", "step", "odd", "text", "other"])
    places = [path for path in paths_of(raw) if len(path) < 4]
    if kind == "json":
        text, told, _ = damage_json(raw, rng, places)
        data = text.encode("utf-8", "surrogatepass")
    elif kind == "encoding":
        data, told = odd_encoding(file.read_text(), rng)
    elif kind == "step" and "step" in raw:
        data, told = (
            json.dumps(
                with_path(raw, ("step",), rng.choice([1, 2, 4, -1, 10**30, "3", 3.0, None, True]))
            ).encode(),
            "another step",
        )
    elif kind == "text":
        path = rng.choice(places)
        data, told = (
            with_text(raw, path, rng.choice(ODD_TEXTS)).encode("utf-8", "surrogatepass"),
            f"{path} written oddly",
        )
    elif kind == "other":
        value = rng.choice([None, [], 3, "x", {}, [raw]])
        data, told = json.dumps(value).encode(), f"holds {str(value)[:20]}"
    else:
        path, new = rng.choice(places), rng.choice(ODD_VALUES)
        data, told = (
            json.dumps(with_path(raw, path, new)).encode("utf-8", "surrogatepass"),
            f"{path} = {str(new)[:30]!r}",
        )
    file.write_bytes(data)
    case.tell(f"{NEWEST}/{file.name}: {told}")
    return [file.name]


def _file(case: Case, root: Path, file: Path) -> list[str]:
    kind = case.rng.choice(
        [
            "gone",
            "gone",
            "empty",
            "folder",
            "pipe",
            "link to nothing",
            "link to its like",
            "longer",
            "unwritable",
        ]
    )
    case.tell(f"{file.relative_to(root)}: {kind}")
    data = file.read_bytes()
    if kind == "longer":
        file.write_bytes(data + b"\x00\xff")
    elif kind == "unwritable":
        file.chmod(0o400)
    else:
        file.unlink()
    if kind == "empty":
        file.write_bytes(b"")
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "link to nothing":
        file.symlink_to("nothing")
    elif kind == "link to its like":
        (root / "elsewhere").write_bytes(data)
        file.symlink_to(root / "elsewhere")
    return [file.name]


def _directory(case: Case, root: Path, folder: Path) -> list[str]:
    rng = case.rng
    kind = rng.choice(
        [
            "renamed up",
            "renamed down",
            "arrays gone",
            "arrays empty",
            "more files",
            "left from a crash",
            "moved aside",
            "odd name",
            "a file of its name",
            "a copy as step 4",
        ]
    )
    case.tell(f"{NEWEST}: {kind}")
    if kind == "renamed up":
        folder.rename(root / "step_00000009")
        return ["step_00000009"]
    if kind == "renamed down":
        folder.rename(root / "step_00000001")
        return ["step_00000001"]
    if kind == "a copy as step 4":
        shutil.copytree(folder, root / "step_00000004")
        return ["step_00000004"]
    if kind == "arrays gone":
        shutil.rmtree(folder / "arrays")
    elif kind == "arrays empty":
        shutil.rmtree(folder / "arrays")
        (folder / "arrays").mkdir()
    elif kind == "more files":
        (folder / "notes.txt").write_text("mine")
        (root / "notes.txt").write_text("mine")
    elif kind == "left from a crash":
        shutil.copytree(folder, root / "step_00000004.orbax-checkpoint-tmp")
        (root / "step_00000004.orbax-checkpoint-tmp" / "manifest.json").unlink()
    elif kind == "moved aside":  # the moment between two renames of a save
        folder.rename(root / f".old_{NEWEST}")
    elif kind == "odd name":
        (root / "step_").mkdir()
        (root / "step_99999999999999999999").mkdir()
        (root / "step_x").write_text("")
    else:
        (root / "step_00000007").write_text("not a folder")
    return ["arrays", "manifest"]
