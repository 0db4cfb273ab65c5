"""The modules that an adapter_config.json names, by PEFT's rules, against those of its file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.model.families.raw import WeightsError

_SHOWN = 3  # modules named in a message
_ALL = "all-linear"
_NO_LINEAR = re.compile(r"(?:.*\.)?(?:lm_head|embed_tokens)")
# the first number after a name, as in model.layers.3
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
# modules in transformers 4 and on the hub, which transformers 5 has as parameters
_OPTIONAL = re.compile(r".*\.(?:mlp|block_sparse_moe)\.(?:gate|router|experts\..*)")


def check_modules(
    config: JsonObject, file_modules: Collection[str], modules: Collection[str], where: str
) -> None:
    """Raises WeightsError unless an adapter's file has factors of exactly the modules that its
    configuration names.

    Args:
        config: the content of adapter_config.json.
        file_modules: the modules of which the file has factors.
        modules: the modules of the base that have a matrix.
        where: the folder, for messages.
    """
    named = set(_named(config, modules, where))
    optional = {name for name in modules if _OPTIONAL.fullmatch(name)}
    missing = named - set(file_modules)
    if optional.isdisjoint(file_modules):
        missing -= optional
    unnamed = set(file_modules) & set(modules) - named
    problems = []
    if missing:
        problems.append(f"it has no factors of {_some(missing)}, which adapter_config.json names")
    if unnamed:
        problems.append(f"it has factors of {_some(unnamed)}, which adapter_config.json does not")
    if not file_modules:
        problems.append("it has no factors")
    if problems:
        raise WeightsError(
            f"{where}: adapter_model.safetensors is not what target_modules, layers_to_transform"
            f" and exclude_modules say: {'; '.join(problems)}: use both files of one training"
        )


def _named(config: JsonObject, modules: Collection[str], where: str) -> Iterator[str]:
    """Yields the modules of the base that a configuration names."""
    targets, parameters = config.get("target_modules"), config.get("target_parameters") or []
    excluded = config.get("exclude_modules") or []
    layers = config.get("layers_to_transform")
    if not targets and not parameters:
        raise WeightsError(f"{where}/adapter_config.json: target_modules names no modules")
    for setting in ("target_modules", "exclude_modules", "layers_pattern", "target_parameters"):
        _check_names(config.get(setting) or [], f"{where}/adapter_config.json: {setting}")
    layers = layers if layers is None or isinstance(layers, list) else [layers]
    if not all(type(i) is int for i in layers or ()):
        raise WeightsError(
            f"{where}/adapter_config.json: layers_to_transform = {layers!r:.80}: numbers of layers"
            " are expected"
        )
    for module in modules:
        by_parameter = any(_ends(f"{module}.weight", name) for name in parameters)
        if by_parameter or _is_target(module, targets, excluded, layers, config):
            yield module


def _is_target(
    module: str, targets: Json, excluded: Json, layers: list[int] | None, config: JsonObject
) -> bool:
    if not targets or (excluded and _matches(module, excluded)):
        return False
    if isinstance(targets, str) and targets.lower() == _ALL:
        return not _NO_LINEAR.fullmatch(module)
    if not _matches(module, targets):
        return False
    # PEFT restricts no pattern and no module that is named in full to layers.
    if isinstance(targets, str) or module in targets or not layers:
        return True
    patterns = config.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    matches = [re.match(rf"(?:^|.*?\.){x}\.(\d+)\.", module) for x in patterns]
    match = next(filter(None, matches), None) if patterns else _LAYER.match(module)
    return match is not None and int(match[1]) in layers


def _matches(module: str, names: Json) -> bool:
    """Returns whether a pattern is the module, or one of the names its end."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(_ends(module, name) for name in names)


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _check_names(value: Json, where: str) -> None:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise WeightsError(f"{where} = {value!r:.80} is no pattern: {error}") from error
    elif not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise WeightsError(f"{where} = {value!r:.80}: a list of names, or a pattern, is expected")


def _some(names: Collection[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"{', '.join(listed[:_SHOWN])}{more}"
