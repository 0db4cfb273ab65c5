"""The harness tried on faults that are planted here: `python -m tests.campaign.planted` prints
the word that each gets.

A plant is a command that raises, hangs, dies, says too little or too much, takes something in
silence, or loses what was there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import fork


def raising() -> None:
    """The command has a mistake."""
    from compass_jax.commands import cli

    def fail(*args: Any) -> None:
        raise ZeroDivisionError("planted")

    cli.override = fail


def hanging() -> None:
    """The command never ends."""
    time.sleep(300)


def dying() -> None:
    """The command is ended by a signal."""
    os.abort()


def says(text: str, status: int) -> Callable[[], None]:
    """The command ends with these words on standard error."""

    def plant() -> None:
        print(text, file=sys.stderr)
        raise SystemExit(status)

    return plant


def deaf() -> None:
    """Every override is taken for what was there."""
    from compass_jax.commands import cli

    cli.override = lambda config, arguments, prog="": config


def short() -> None:
    """The last row of the prompts is lost."""
    from compass_jax.training import loop

    real = loop.train_prompts
    loop.train_prompts = lambda *args, **options: real(*args, **options)[:-1]


def words(folder: Path) -> dict[str, str]:
    """Plant -> the word that the harness has for it."""
    from . import checkpoints, configuration, row_meaning, settings, spies
    from .words import Expected, judge
    from .world import CONFIG, ROWS, Case, World

    world = World(folder / "world")
    world.build()
    found: dict[str, str] = {}

    def case(name: str) -> Case:
        place = folder / name.replace(" ", "_")
        place.mkdir()
        made = Case(0, 0, "planted", place, world)
        made.bring("rows.jsonl", "tokenizer")
        return made

    base = settings.flat(configuration.baseline(case("baseline")))
    seeded = Expected([base | {"seed": 5}], ["seed"])
    refused = Expected([], ["seed"])
    dry = ["train", CONFIG, "--dry-run", "--json", "--seed", "5"]
    plants: dict[str, tuple[Callable[[], None] | None, Expected]] = {
        "nothing planted": (None, seeded),
        "raises": (raising, seeded),
        "hangs": (hanging, seeded),
        "dies": (dying, seeded),
        "refuses by name": (says("compass train: seed = 5: too lucky", 2), refused),
        "refuses without a name": (says("compass train: wrong", 2), refused),
        "refuses in others' words": (says("ValueError: seed", 1), refused),
        "refuses at length": (says("compass train: seed\n" + "at x\n" * 40, 1), refused),
        "another status": (says("compass train: seed", 3), refused),
        "accepts what is not legal": (None, refused),
        "ignores an option": (deaf, seeded),
    }
    for name, (plant, expected) in plants.items():
        limit = 1.0 if name == "hangs" else 60.0
        ended = case(name).compass(dry, before=plant, seconds=limit)
        found[name] = judge(configuration._printed(ended), expected).word

    wanted = Expected([[row_meaning.question(row) for row in ROWS]], ["rows.jsonl"])
    for name, plant in (("reads all rows", None), ("loses a row", short)):
        one = case(name)
        ended = row_meaning.asked(one.compass(["train", CONFIG], spies.prompts, before=plant), one)
        found[name] = judge(ended, wanted).word

    one = case("starts anew")
    ended = one.compass(["train", CONFIG], spies.restored)
    sound = {checkpoints.NEWEST: {"step": 3}, checkpoints.OLDER: {"step": 2}}
    found["starts anew beside checkpoints"] = checkpoints._judge(
        ended, sound, ["manifest.json"]
    ).word
    older = fork.Ended(0, "", "", outcome={"step": 2})
    found["goes back in silence"] = checkpoints._judge(older, sound, ["manifest.json"]).word
    return found


if __name__ == "__main__":
    fork.prepare_environment(Path(tempfile.gettempdir()) / "compass_campaign_programs")
    fork.warm()
    # Not TemporaryDirectory: a child that ends as an interpreter does would remove it.
    place = Path(tempfile.mkdtemp(prefix="planted_"))
    print(json.dumps(words(place)))
    shutil.rmtree(place)
