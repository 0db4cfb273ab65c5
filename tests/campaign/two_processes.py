"""Two processes on one directory, or on one port: one of them works as if it were alone, the
other is refused by words, or both end well.
"""

from __future__ import annotations

import json
import socket
import time

from .checkpoints import STEPS
from .logs import steps
from .words import CLEAR, GOOD, HARMLESS, LOST, SILENT, Ended, Expected, Verdict, judge
from .world import CONFIG, Case, read_safetensors

SHARE = 2


def run(case: Case) -> Verdict:
    """Two commands at one time, the second a moment later."""
    kind = case.rng.choice(
        ["train", "sft", "export", "export", "import", "import", "filter", "serve", "train and sft"]
    )
    wait_s = case.rng.choice([0.0, 0.02, 0.1, 0.3, 1.0])
    case.tell(f"two times {kind}, {wait_s} s between them")
    return {
        "train": _train,
        "sft": _sft,
        "export": _export,
        "import": _import,
        "filter": _filter,
        "serve": _serve,
        "train and sft": _mixed,
    }[kind](case, wait_s)


def _both(case: Case, first: list[str], second: list[str], wait_s: float) -> list[Ended]:
    one = case.start(first, seconds=120, cpu_s=120)
    time.sleep(wait_s)
    two = case.start(second, seconds=120, cpu_s=120)
    return [one.wait(), two.wait()]


def _verdict(ended: list[Ended], name: str, sound: bool, both: bool) -> Verdict:
    """sound: what is there now is what one command alone writes. both: whether both may end
    well.
    """
    for one in ended:
        if one.status != 0 or one.timed_out:
            verdict = judge(one, Expected([], [name]))
            if verdict.word not in GOOD:
                return verdict
    well = [one for one in ended if one.status == 0]
    if not well:
        return Verdict(LOST, f"neither did the work: {ended[0].err[-200:]!r}")
    if not sound:
        return Verdict(LOST, "what is there is not what one of them alone writes")
    if len(well) == 2:
        return Verdict(HARMLESS) if both else Verdict(SILENT, "both wrote")
    return Verdict(CLEAR)


def _train(case: Case, wait_s: float) -> Verdict:
    wanted = steps(case.world.made("trained", ["train", CONFIG, *STEPS]) / "run")
    case.bring("rows.jsonl", "tokenizer")
    argv = ["train", CONFIG, *STEPS]
    ended = _both(case, argv, argv, wait_s)
    return _verdict(ended, "run", steps(case.folder / "run") == wanted, False)


def _sft(case: Case, wait_s: float) -> Verdict:
    wanted = steps(case.world.made("tuned", ["sft", CONFIG]) / "run")
    case.bring("rows.jsonl", "chats.jsonl", "tokenizer")
    ended = _both(case, ["sft", CONFIG], ["sft", CONFIG], wait_s)
    return _verdict(ended, "run", steps(case.folder / "run") == wanted, False)


def _mixed(case: Case, wait_s: float) -> Verdict:
    """A training and a fine-tuning of one directory."""
    wanted = [
        steps(case.world.made(*made) / "run")
        for made in (("trained", ["train", CONFIG, *STEPS]), ("tuned", ["sft", CONFIG, *STEPS]))
    ]
    case.bring("rows.jsonl", "chats.jsonl", "tokenizer")
    ended = _both(case, ["train", CONFIG, *STEPS], ["sft", CONFIG, *STEPS], wait_s)
    return _verdict(ended, "run", steps(case.folder / "run") in wanted, False)


def _export(case: Case, wait_s: float) -> Verdict:
    world = case.world.made("trained", ["train", CONFIG, *STEPS])
    made = case.world.made("out_of_trained", ["import-hf", "hf", "imported"])
    assert made
    case.bring("run", source=world)
    ended = _both(case, ["export-hf", "run", "out"], ["export-hf", "run", "out"], wait_s)
    alone = case.compass(["export-hf", "run", "alone"])
    assert alone.status == 0, alone.err
    return _verdict(
        ended,
        "out",
        read_safetensors(case.folder / "out") == read_safetensors(case.folder / "alone"),
        True,
    )


def _import(case: Case, wait_s: float) -> Verdict:
    case.bring("hf")
    ended = _both(case, ["import-hf", "hf", "out"], ["import-hf", "hf", "out"], wait_s)
    back = case.compass(["export-hf", "out", "back"])
    sound = back.status == 0 and read_safetensors(case.folder / "back") == read_safetensors(
        case.folder / "hf"
    )
    return _verdict(ended, "out", sound, False)


def _filter(case: Case, wait_s: float) -> Verdict:
    world = case.world.made("trained", ["train", CONFIG, *STEPS])
    case.bring("rows.jsonl", "tokenizer", "run", source=world)
    argv = ["filter", CONFIG, "--checkpoint", "run", "--out", "out", "--samples", "2"]
    ended = _both(case, argv, argv, wait_s)
    file = case.folder / "out" / "pass_rates.jsonl"
    ids = (
        [json.loads(line)["id"] for line in file.read_text().splitlines()] if file.exists() else []
    )
    return _verdict(ended, "out", len(ids) == len(set(ids)) == 6, wait_s > 0)


def _serve(case: Case, wait_s: float) -> Verdict:
    """A server on a port that somebody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        case.bring("hf")
        argv = [
            "serve",
            "hf",
            "--openai",
            "--port",
            port,
            "--slots",
            "1",
            "--prompt-tokens",
            "16",
            "--max-new-tokens",
            "4",
        ]
        return judge(case.compass(argv), Expected([], [port]))
