"""The pictures in docs/img, which `python docs/generate/pictures.py` writes in the top folder."""

from __future__ import annotations

from pathlib import Path

from svg import Picture

IMG = Path(__file__).parents[1] / "img"


def flow() -> Picture:
    """Draws one step: prompts, rollout, rewards, advantages, updates, and the weights' way back."""
    p = Picture(860, 300, "One step of training")
    p.box(20, 60, 130, 70, ("prompts", "files, tasks,", "selection"))
    p.box(190, 60, 170, 70, ("rollout", "continuous batching,", "paged KV cache"), "rollout")
    p.box(400, 60, 130, 70, ("rewards", "verifiers in", "sandboxes"), "reward")
    p.box(570, 60, 130, 70, ("advantages", "by group; uniform", "groups by stages"), "train")
    p.box(570, 190, 270, 70, ("updates", "old log-probs, objective, gradients"), "train")
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
        20, 26, "One model function, two programs: what the router chose in the rollout", at="start"
    )
    p.text(20, 44, "is an array that the update replays.", at="start")
    return p


def zero_variance() -> Picture:
    """Draws where the five stages act on a prompt whose answers are all alike."""
    p = Picture(860, 190, "The stages of the zero-variance elimination")
    stages = (
        ("0  filter", "before the run", "drop by pass rate", "plain"),
        ("1  selection", "before a rollout", "skip for a while", "plain"),
        ("2  growth", "in the rollout", "sample more", "rollout"),
        ("3  shaping", "after the reward", "penalties differ", "reward"),
        ("4  RL-ZVP", "in the advantage", "learn from entropy", "train"),
    )
    for i, (name, when, what, kind) in enumerate(stages):
        p.box(20 + 168 * i, 60, 138, 74, (name, when, what), kind)
        if i:
            p.arrow([(20 + 168 * i - 30, 97), (20 + 168 * i - 2, 97)])
    p.text(20, 34, "A group whose rewards are all equal has advantage 0.", at="start", bold=True)
    p.text(
        20, 166, "Each stage sees what the earlier ones left; every token is counted.", at="start"
    )
    return p


def curriculum() -> Picture:
    """Draws three stages as bars of their mixes, hard prompts growing from left to right."""
    p = Picture(860, 250, "Stages of rising difficulty")
    p.text(20, 30, "Shares of the prompts by pass rate, stage by stage", at="start", bold=True)
    stages = (
        ("stage 0", "from step 0", (0.1, 0.4, 0.5), "8 samples, 8k tokens"),
        ("stage 1", "from step 200", (0.3, 0.5, 0.2), "16 samples, 16k tokens"),
        ("stage 2", "from step 500", (0.6, 0.35, 0.05), "16 samples, 30k tokens"),
    )
    for i, (name, when, mix, settings) in enumerate(stages):
        x, left = 20 + 280 * i, 20.0 + 280 * i
        p.text(x, 62, f"{name}, {when}", at="start")
        for share, kind in zip(mix, ("loss", "reward", "train"), strict=True):
            p.bar(left, 75, 240 * share, 60, kind)
            if share >= 0.1:
                p.text(left + 120 * share, 110, f"{share:.0%}", small=True)
            left += 240 * share
        p.text(x, 158, settings, at="start", small=True)
        if i:
            p.arrow([(x - 38, 105), (x - 4, 105)])
    for i, (words, kind) in enumerate(
        (
            ("hard: 0 to 0.3", "loss"),
            ("middling: 0.3 to 0.7", "reward"),
            ("easy: 0.7 to 1", "train"),
        )
    ):
        p.bar(20 + 200 * i, 180, 18, 18, kind)
        p.text(46 + 200 * i, 194, words, at="start", small=True)
    p.text(20, 230, "weights, moments, order, pass rates: all go on at a boundary", at="start")
    return p


def espo() -> Picture:
    """Draws the entropies of one answer's tokens, their two groups, and each group's clip range."""
    p = Picture(860, 260, "ESPO's entropy groups")
    p.text(20, 30, "Entropy of each token of one answer, in nats", at="start", bold=True)
    entropies = (0.02, 0.01, 1.2, 0.03, 0.9)
    p.line([(40, 205), (440, 205)])
    for i, e in enumerate(entropies):
        high = max(3, 120 * e)
        p.box(60 + 75 * i, 205 - high, 46, high, (), "loss" if e > 0.5 else "rollout")
        p.text(83 + 75 * i, 198 - high, f"{e:g}", small=True)
        p.text(83 + 75 * i, 224, f"token {i}", small=True)
    p.box(490, 60, 340, 70, ("uncertain tokens", "clip range 1.8e-3: may move far"), "loss")
    p.box(490, 150, 340, 70, ("certain tokens", "clip range 3.4e-5: may hardly move"), "rollout")
    return p


def router_replay() -> Picture:
    """Draws the routes of the rollout, which are used again in training; the gates are not."""
    p = Picture(860, 250, "Router replay R3")
    for y, name, kind in ((50, "rollout", "rollout"), (160, "training", "train")):
        p.box(20, y, 170, 60, (name, "router logits"), kind)
        p.box(640, y, 200, 60, ("experts 0 and 1", "gates from own logits"), kind)
        p.arrow([(190, y + 30), (248, y + 30)])
    p.box(250, 50, 150, 60, ("top-k", "experts 0 and 1"), "rollout")
    p.box(250, 160, 150, 60, ("top-k, live", "experts 0 and 2"), "loss")
    p.box(455, 105, 150, 60, ("routes", "an array on the device"), "reward")
    p.arrow([(400, 80), (638, 80)])
    p.arrow([(400, 80), (530, 80), (530, 103)])
    p.arrow([(530, 165), (530, 190), (638, 190)])
    p.text(405, 212, "counted as a flip, not used", at="start", small=True)
    return p


def corrections() -> Picture:
    """Draws the weight of a token against rho, for TIS and IcePop."""
    p = Picture(860, 260, "Weights of the corrections")
    p.text(
        20, 30, "Weight of a token against rho = p(training) / p(rollout)", at="start", bold=True
    )
    for left, name in ((60, "TIS: min(rho, 2)"), (480, "IcePop: rho within 0.5 to 5, else 0")):
        p.line([(left, 60), (left, 220), (left + 320, 220)])
        p.text(left + 160, 60, name)
        for rho in range(1, 6):
            p.text(left + 60 * rho, 238, str(rho), small=True)
    p.line([(60, 220), (180, 164), (360, 164)], "#3f83c4", 3)
    p.line([(480, 220), (510, 220), (510, 206), (780, 80), (780, 220), (800, 220)], "#4a9a4a", 3)
    return p


def one_step_off() -> Picture:
    """Draws two timelines: rollout and updates one after the other, and at the same time."""
    p = Picture(860, 250, "One step off policy")
    p.text(20, 40, "on policy", at="start", bold=True)
    for i in range(3):
        p.box(20 + 240 * i, 55, 140, 34, (f"rollout {i + 1}",), "rollout")
        p.box(160 + 240 * i, 55, 100, 34, (f"update {i + 1}",), "train")
    p.text(20, 140, "one step off", at="start", bold=True)
    for i in range(4):
        p.box(20 + 140 * i, 155, 140, 34, (f"rollout {i + 1}",), "rollout")
        p.box(160 + 140 * i, 191, 100, 34, (f"update {i + 1}",), "train")
    p.text(850, 240, "time", at="end", small=True)
    return p


def partial_rollouts() -> Picture:
    """Draws bars of groups: the step ends when enough are whole; the others continue in the next
    step.
    """
    p = Picture(860, 250, "Partial rollouts")
    lengths = (150, 210, 260, 190, 560, 430)
    for i, length in enumerate(lengths):
        y = 50 + 27 * i
        p.text(20, y + 16, f"group {i}", at="start", small=True)
        p.box(80, y, min(length, 260), 20, (), "rollout")
        if length > 260:
            p.box(345, y, length - 260, 20, (), "reward")
    p.line([(342, 30), (342, 220)])
    p.text(200, 28, "step n: four groups are whole", small=True)
    p.text(360, 28, "step n + 1: the others go on where they stopped", at="start", small=True)
    p.text(
        80,
        240,
        "tokens, log-probs and routes are kept; each token knows its policy version",
        at="start",
        small=True,
    )
    return p


def drafts() -> Picture:
    """Draws an answer of the last visit, its accepted prefix, and the tokens sampled after it."""
    p = Picture(860, 210, "Drafts")
    p.text(20, 30, "One answer to a prompt, at two visits", at="start", bold=True)
    for y, name in ((50, "last visit"), (130, "this visit")):
        p.text(20, y + 22, name, at="start", small=True)
        p.box(110, y, 110, 36, ("prompt",), "plain")
    p.box(220, 50, 520, 36, ("answer, sampled: the draft",), "rollout")
    p.box(220, 130, 340, 36, ("accepted prefix: one pass",), "train")
    p.box(560, 130, 250, 36, ("sampled anew",), "rollout")
    p.line([(560, 44), (560, 172)])
    p.text(568, 108, "first token that is not accepted", at="start", small=True)
    p.text(220, 194, "log-probs, routes: of the present policy", at="start", small=True)
    return p


# From the top: a room imports from the rows below it alone (tests/test_house_rules.py).
ROOMS = (
    (("commands", "the command line, shipped configurations"),),
    (("apps", "plan, curate, pipeline"),),
    (("training", "learner, updates, hooks, the loop"),),
    (("experience", "samples in flight, step policies, evaluation"),),
    (("rollout", "engine, paged cache, server, samplers"), ("runs", "directory, trackers, report")),
    (("data", "prompts, rows, tokenizer"), ("weights", "Hugging Face, checkpoints, sync")),
    (("rewards", "verifiers, judges, tasks, workers"), ("model", "one function, families")),
    (("rl", "objectives, advantages"), ("devices", "meshes, processes, chips")),
    (("config", "settings, interfaces of the seams"),),
    (("base", "records, errors, forms of answers"),),
)  # fmt: skip
COLOURED = {"training": "train", "experience": "rollout", "rollout": "rollout", "model": "rollout"}
COLOURED |= {"rewards": "reward"}


def architecture() -> Picture:
    """Draws the rooms of the package: a room imports from those below it."""
    p = Picture(860, 60 + 58 * len(ROOMS), "The rooms of the package")
    for i, row in enumerate(ROOMS):
        width = (840 - 20 * len(row)) / len(row)
        for j, lines in enumerate(row):
            kind = COLOURED.get(lines[0], "plain")
            p.box(20 + (width + 20) * j, 40 + 58 * i, width, 46, lines, kind)
    p.text(20, 26, "A room imports from the rows below it, never from above.", at="start")
    return p


PICTURES = {
    "flow": flow,
    "zero_variance": zero_variance,
    "curriculum": curriculum,
    "espo": espo,
    "router_replay": router_replay,
    "corrections": corrections,
    "one_step_off": one_step_off,
    "partial_rollouts": partial_rollouts,
    "drafts": drafts,
    "architecture": architecture,
}


def main() -> None:
    """Writes every picture."""
    for name, draw in PICTURES.items():
        (IMG / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
