"""Registry of verifiers by name: built-in ones, and those that installed packages register as entry
points.

    [project.entry-points."compass_jax.verifiers"]
    chess = "my_package.chess:KIND"
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points

from compass_jax.errors import UserError
from compass_jax.verifiers import kinds as folder
from compass_jax.verifiers.base import Kind

GROUP = "compass_jax.verifiers"


@cache
def kinds() -> dict[str, Kind]:
    """Returns all verifiers by name. Raises UserError if the verifier of an installed package is
    unusable.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    modules = {name: importlib.import_module(f"{folder.__name__}.{name}") for name in names}
    by_name = {name: module.KIND for name, module in modules.items() if hasattr(module, "KIND")}
    for module in modules.values():
        by_name |= getattr(module, "KINDS", {})
    for point in entry_points(group=GROUP):
        where = f"the verifier {point.name!r} of {point.dist.name if point.dist else point.value}"
        if point.name in by_name:
            raise UserError(f"{where}: there is a verifier of this name; give it another one")
        try:
            kind = point.load()
        except Exception as error:
            raise UserError(
                f"{where} ({point.value}) cannot be imported: {type(error).__name__}: {error};"
                " mend or remove the package"
            ) from error
        if not isinstance(kind, Kind):
            raise UserError(
                f"{where} ({point.value}) is a {type(kind).__name__}; make it a"
                " compass_jax.verifiers.base.Kind"
            )
        by_name[point.name] = kind
    return by_name
