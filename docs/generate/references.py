"""The reference, from the code: settings and metrics, which docs/reference holds, and the functions
of a few modules, which the site alone has (links.py).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from compass_jax.commands.settings import are_named, field_docs, sections_of
from compass_jax.config import RunConfig, Seam, seam_class
from compass_jax.config.ranges import Range, field_hints, options, type_name
from compass_jax.runs.metric_table import METRICS

REFERENCE = Path(__file__).parents[1] / "reference"
PACKAGE = "compass_jax"
API = {
    "rl": (
        "The functions of reinforcement learning. They know arrays alone: no model, mesh, prompt or"
        " file.",
        (
            "rl.group_advantage",
            "rl.advantages.inputs",
            "rl.advantages.grpo",
            "rl.advantages.rloo",
            "rl.advantages.reinforce_pp",
            "rl.advantages.maxrl",
            "rl.advantages.prediction",
            "rl.advantages.predicted",
            "rl.advantages.shrunk",
            "rl.zero_variance",
            "rl.shaping",
            "rl.correction",
            "rl.corrections.inputs",
            "rl.corrections.tis",
            "rl.corrections.icepop",
            "rl.corrections.sequence",
            "rl.surrogate",
            "rl.policy",
            "rl.prepare",
            "rl.grouping",
            "rl.bucketing",
            "rl.objectives.inputs",
            "rl.objectives.espo",
            "rl.objectives.gspo",
            "rl.objectives.grpo",
            "rl.objectives.cispo",
        ),
    ),
    "learner": (
        "The learner turns a scored rollout into updates. It can be used without the rest of the"
        " package.",
        (
            "training.learner",
            "training.scored",
            "training.step",
            "training.optim",
            "experience.assemble",
            "base.records",
        ),
    ),
    "step-policy": (
        "A step policy decides which prompts are rolled out next and which groups a step trains on"
        " ([how to write one](../howto/step_policy.md)).",
        (
            "config.step_policy",
            "experience.step_policies.inputs",
            "experience.step_policies.rounds",
            "experience.step_policies.plain",
            "experience.step_policies.dynamic",
            "experience.step_policies.partial",
            "experience.step_policies.screening",
        ),
    ),
    "predictor": (
        "A predictor says which pass rate a prompt has that was never sampled"
        " ([how to write one](../howto/predictor.md)).",
        (
            "config.predictor",
            "data.predictors.inputs",
            "data.predictors.label",
            "data.predictors.regression",
            "data.predictors.text",
            "data.predictors.state",
        ),
    ),
    "pipeline": (
        "A pipeline is a list of stages ([how to run one](../howto/pipeline.md)).",
        ("apps.pipeline.stages", "apps.pipeline.work"),
    ),
    "tasks": (
        "What is learnt: prompts, and how an answer to one is judged.",
        ("rewards.tasks.task", "config.verifiers", "commands.library", "commands.run"),
    ),
}


def main() -> None:
    """Writes the pages of docs/reference."""
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)


def pages() -> dict[str, str]:
    """Returns the texts of docs/reference by their names."""
    return {"configuration.md": configuration(), "metrics.md": metrics()}


def api_pages() -> dict[str, str]:
    """Returns the texts of the pages on functions by their names."""
    return {f"api-{name}.md": _api(name, *about) for name, about in API.items()}


def configuration() -> str:
    """Lists every setting: key, type, range, default, sentence."""
    lines = [
        "# Settings",
        "",
        "Every setting can be written on the command line, after a configuration or beside",
        "`--model`: `--rl.steps 20`. In a configuration file it is a field of the class that is",
        "named here.",
        "`compass train CONFIG --help` prints the same list with the values of CONFIG.",
        "This page is generated from the code by `make docs`.",
        "",
    ]
    for key, cls, text in _sections(RunConfig, ""):
        title = f"`{key}`" if key else "The run"
        lines += [f"## {title}", "", f"`{cls.__name__}`. {text or _first(cls)}", ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(key, cls, field) for field in dataclasses.fields(cls) if _plain(cls, field)]
        lines.append("")
    return "\n".join(lines)


def _sections(cls: Any, key: str, text: str = "") -> Iterator[tuple[str, type, str]]:
    yield key, cls, text
    docs, hints = field_docs(cls), field_hints(cls)
    for field in dataclasses.fields(cls):
        inner = list(dict.fromkeys(sections_of(hints[field.name])))
        name = f"{key}.{field.name}" if key else field.name
        if name in ("data.eval_sources", "rl.stages.0.objective"):  # as data.sources, rl.objective
            continue
        for one in inner:
            if issubclass(one, Seam):
                for short in one.classes:
                    cls = seam_class(one, short)
                    yield f"{name}: {short}", cls, _first(cls)
            else:
                many = get_origin(hints[field.name]) is tuple
                title = f"{name}.0" if many else name
                yield from _sections(
                    one, title, docs.get(field.name, "") if len(inner) == 1 else ""
                )


def _plain(cls: type, field: dataclasses.Field) -> bool:
    hint = field_hints(cls)[field.name]
    return not sections_of(hint) or are_named(hint)


def _row(key: str, cls: type, field: dataclasses.Field) -> str:
    place = key.split(":")[0]
    name = f"{place}.{field.name}" if place else field.name
    hint = field_hints(cls)[field.name]
    kind = f"{type_name(hint)}{_range(hint)}"
    cells = f"`{name}`", kind, _default(field), field_docs(cls)[field.name]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _range(hint: Any) -> str:
    for option in options(hint):
        if get_origin(option) is Annotated:
            for rule in get_args(option)[1:]:
                if isinstance(rule, Range):
                    above = "above " if rule.above else ""
                    return f", {above}{_number(rule.low)} to {_number(rule.high)}"
    return ""


def _number(x: float) -> str:
    return f"{x:,}" if isinstance(x, int) else f"{x:g}"


def _default(field: dataclasses.Field) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "must be given"
    if value == "" or value == ():
        return "none"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def metrics() -> str:
    """Lists every metric: name, unit, sentence."""
    lines = [
        "# Metrics",
        "",
        'A line of `metrics.jsonl` is `{"stage": ..., "step": ..., "metrics": {name: number}}`.',
        "A number that is not finite is null. Shares lie between 0 and 1.",
        "A part in angle brackets is a name of the run: a label, a verifier's part, a number.",
        "This page is generated from `compass_jax/runs/metric_table.py` by `make docs`.",
        "",
        "| metric | unit | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {metric.unit} | {metric.text} |" for name, metric in METRICS.items()]
    return "\n".join([*lines, ""])


def _api(name: str, about: str, modules: tuple[str, ...]) -> str:
    lines = [f"# API: {name}", "", about, "This page is generated from the docstrings.", ""]
    for module in modules:
        module_object = importlib.import_module(f"{PACKAGE}.{module}")
        text = _paragraphs(inspect.getdoc(module_object) or "")
        lines += [f"## {PACKAGE}.{module}", "", *text, ""]
        for one in _public(module_object):
            lines += [f"### {one.name}", "", "```python", *_signature(one), "```", ""]
            lines += [*_paragraphs(ast.get_docstring(one) or ""), ""]
            if isinstance(one, ast.ClassDef):
                for method in _methods(one):
                    lines += [f"#### {one.name}.{method.name}", "", "```python"]
                    lines += [*_signature(method), "```", ""]
                    lines += [*_paragraphs(ast.get_docstring(method) or ""), ""]
    return "\n".join(lines)


def _public(module: Any) -> list[Any]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = ast.parse(inspect.getsource(module)).body
    return [x for x in body if isinstance(x, kinds) and not x.name.startswith("_")]


def _methods(cls: ast.ClassDef) -> list[Any]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [x for x in cls.body if isinstance(x, kinds) and not x.name.startswith("_")]


def _signature(node: Any) -> list[str]:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        head = f"class {node.name}({bases})" if bases else f"class {node.name}"
        fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
        return [head + (":" if fields else ""), *(f"    {ast.unparse(x)}" for x in fields)]
    parts = _arguments(node.args)
    back = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    flat = f"def {node.name}({', '.join(parts)}){back}"
    if len(flat) <= 96:
        return [flat]
    return [f"def {node.name}(", *(f"    {part}," for part in parts), f"){back}"]


def _arguments(args: ast.arguments) -> list[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults: list[Any] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    parts = [_argument(a, d) for a, d in zip(positional, defaults, strict=True)]
    if args.vararg:
        parts.append(f"*{_argument(args.vararg, None)}")
    elif args.kwonlyargs:
        parts.append("*")
    parts += [_argument(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return parts + ([f"**{_argument(args.kwarg, None)}"] if args.kwarg else [])


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    hint = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
    if default is None:
        return f"{arg.arg}{hint}"
    return f"{arg.arg}{hint}{' = ' if hint else '='}{ast.unparse(default)}"


def _paragraphs(text: str) -> list[str]:
    """Returns a docstring as Markdown: an indented part is a block of text."""
    lines, out, inside = text.splitlines(), [], False
    for i, line in enumerate(lines):
        block = line.startswith("    ") or (
            not line and inside and any(x.strip() for x in lines[i:]) and _next(lines, i)
        )
        if block and not inside:
            out += ["", "```text"]
        if inside and not block:
            out += ["```", ""]
        inside = block
        out.append(line)
    text = "\n".join(out + (["```"] if inside else []))
    return re.sub(r"\n{3,}", "\n\n", text).splitlines()


def _next(lines: list[str], i: int) -> bool:
    return next(x for x in lines[i:] if x.strip()).startswith("    ")


def _first(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    main()
