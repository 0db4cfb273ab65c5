"""Full disks: a small tmpfs, or where mounts are not allowed a limit on the size of files; then
room again, and the same command.

The command has to end with an error of a few lines that names the path; what was whole before is
whole after it; with room again the same command ends well, and its numbers are those of a run
that never saw a full disk.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from . import spies
from .checkpoints import STEPS, _digest
from .logs import steps
from .run_directories import mounted, unmount
from .words import GOOD, LOST, SILENT, Expected, Verdict, judge
from .world import CONFIG, Case, read_safetensors

SHARE = 3


def run(case: Case) -> Verdict:
    """One command on a disk that fills."""
    kind = case.rng.choice(
        ["import", "import", "export", "export", "limit", "limit", "train", "resume"]
    )
    if kind == "limit":
        return _limit(case)
    room = case.rng.choice(
        ["4k", "16k", "32k", "64k", "100k", "150k", "200k", "300k", "500k", "800k"]
    )
    case.tell(f"{kind} on a disk of {room}")
    place = case.folder / "disk"
    if not mounted(place, f"size={room}"):
        return _limit(case)
    try:
        return {"import": _import, "export": _export, "train": _train, "resume": _resume}[kind](
            case, place
        )
    finally:
        unmount(place)


def _more_room(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True, capture_output=True)


def _sound_import(case: Case) -> dict:
    return case.world.outcome("import", ["import-hf", "hf", "out"], spies.exported(Path("out")))


def _import(case: Case, place: Path) -> Verdict:
    case.bring("hf")
    argv = ["import-hf", "hf", "disk/out"]
    verdict = judge(case.compass(argv), Expected([], ["disk", "space"]))
    if verdict.word == SILENT:  # it fitted
        verdict = Verdict("harmless")
    elif verdict.word in GOOD:
        _more_room(place)
        again = case.compass(argv, spies.exported(place / "out"))
        verdict = (
            verdict
            if again.status == 0 and again.outcome == _sound_import(case)
            else judge(again, Expected([_sound_import(case)], ["disk"]))
        )
    return verdict


def _export(case: Case, place: Path) -> Verdict:
    world = case.world.made("trained", ["train", CONFIG, *STEPS])
    case.bring("run", source=world)
    before = _digest(case.folder / "run")
    ended = case.compass(["export-hf", "run", "disk/out"])
    verdict = judge(ended, Expected([], ["disk", "space"]))
    if verdict.word == SILENT:
        shutil.rmtree(case.folder / "run" / "tokenizer")  # nothing more is read from it
        verdict = Verdict("harmless") if len(read_safetensors(place / "out")) > 10 else verdict
        return verdict
    return (
        Verdict(LOST, "the run was changed") if _digest(case.folder / "run") != before else verdict
    )


def _train(case: Case, place: Path) -> Verdict:
    case.bring("rows.jsonl", "tokenizer")
    argv = ["train", CONFIG, *STEPS, "--run-dir", "disk/run"]
    return _go_on(
        case,
        place,
        argv,
        judge(case.compass(argv, seconds=90, cpu_s=90), Expected([], ["disk", "space"])),
    )


def _resume(case: Case, place: Path) -> Verdict:
    """The disk is full when the next checkpoint is to be written."""
    world = case.world.made("trained", ["train", CONFIG, *STEPS])
    case.bring("rows.jsonl", "tokenizer")
    _more_room(place)
    shutil.copytree(world / "run", place / "run")
    shutil.rmtree(place / "run" / "checkpoints" / "step_00000003")
    sound = _digest(place / "run" / "checkpoints" / "step_00000002")
    used = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    room = used + case.rng.choice([8, 60, 200, 400]) * 1024
    subprocess.run(
        ["mount", "-o", f"remount,size={max(room, 500_000)}", str(place)],
        check=True,
        capture_output=True,
    )
    argv = ["train", CONFIG, *STEPS, "--run-dir", "disk/run"]
    verdict = judge(case.compass(argv, seconds=90, cpu_s=90), Expected([], ["disk", "space"]))
    if verdict.word in GOOD and _digest(place / "run" / "checkpoints" / "step_00000002") != sound:
        return Verdict(LOST, "the checkpoint of step 2 is gone or changed")
    return _go_on(case, place, argv, verdict)


def _go_on(case: Case, place: Path, argv: list[str], verdict: Verdict) -> Verdict:
    """With room again, the same command; its log must be the undisturbed one's."""
    wanted = steps(case.world.made("trained", ["train", CONFIG, *STEPS]) / "run")
    if verdict.word == SILENT:
        verdict = Verdict("harmless")
    elif verdict.word not in GOOD:
        return verdict
    else:
        _more_room(place)
        again = case.compass(argv, seconds=90, cpu_s=90)
        if again.status != 0:
            return judge(again, Expected([0], ["disk"]))
    return (
        verdict
        if steps(place / "run") == wanted
        else Verdict(LOST, "the log is not that of the undisturbed run")
    )


def _limit(case: Case) -> Verdict:
    """Files may have so many bytes and no more."""
    size = case.rng.choice([5_000, 10_000, 20_000, 60_000])
    importing = case.rng.random() < 0.5
    case.tell(f"{'import' if importing else 'export'}-hf, files of at most {size} bytes")
    if importing:
        case.bring("hf")
        ended = case.compass(["import-hf", "hf", "out"], file_bytes=size)
        whole = [_sound_import(case)]
    else:
        case.bring("run", source=case.world.made("trained", ["train", CONFIG, *STEPS]))
        ended = case.compass(["export-hf", "run", "out"], file_bytes=size)
        whole = []
    verdict = judge(ended, Expected([], ["out"]))
    if verdict.word != SILENT:
        return verdict
    # it says that it has written all of it
    if importing:
        again = case.compass(["export-hf", "out", "back"])
        return (
            Verdict("harmless")
            if again.status == 0 and read_safetensors(case.folder / "back") == whole[0]["tensors"]
            else verdict
        )
    return Verdict("harmless") if len(read_safetensors(case.folder / "out")) > 10 else verdict
