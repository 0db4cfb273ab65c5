"""Writes docs/img/*.svg. `python docs/generate/pictures.py` in the top folder."""

from __future__ import annotations

from pathlib import Path

from svg import Picture

IMG = Path(__file__).parents[1] / "img"


def flow() -> Picture:
    """One step: prompts, rollout, rewards, advantages, updates, and the weights' way back."""
    p = Picture(860, 300, "One step of training")
    p.box(20, 60, 130, 70, ("prompts", "files, tasks,", "selection"))
    p.box(190, 60, 170, 70, ("rollout", "continuous batching,", "paged KV cache"), "rollout")
    p.box(400, 60, 130, 70, ("rewards", "verifiers in", "sandboxes"), "reward")
    p.box(570, 60, 130, 70, ("advantages", "by group; uniform", "groups by stages"), "train")
    p.box(570, 190, 270, 70, ("updates", "old log-probs, objective, gradients", ""), "train")
    p.box(740, 60, 100, 70, ("account", "every token:", "its signal"), "plain")
    p.box(20, 190, 130, 70, ("checkpoint", "kill -9 safe"), "plain")
    p.box(
        190,
        190,
        170,
        70,
        ("weight sync", "resharded on the devices,", "8 bits if asked"),
        "rollout",
    )
    for x in (150, 360, 530, 700):
        p.arrow([(x, 95), (x + 38, 95)])
    p.arrow([(635, 130), (635, 188)])
    p.arrow([(568, 225), (362, 225)])
    p.arrow([(275, 190), (275, 132)])
    p.arrow([(188, 225), (152, 225)])
    p.arrow([(330, 132), (330, 160), (600, 160), (600, 188)], dashed=True)
    p.text(452, 176, "tokens, log-probs, routes: on the device", small=True)
    p.text(
        20, 34, "One model function, two programs: what the router chose in the rollout", at="start"
    )
    p.text(20, 52, "is an array that the update replays.", at="start")
    return p


PICTURES = {"flow": flow}


def main() -> None:
    """Writes every picture."""
    for name, draw in PICTURES.items():
        (IMG / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
