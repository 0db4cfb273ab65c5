"""What the configuration knows of a policy objective: a base class, and how a class is named.

The objectives themselves compute, so they lie in rl/objectives/, one file each, or in a user's own
file. They are found by name: `espo` is the class of that name in rl/objectives/, `my_rl:Mine` and
`my_rl.py:Mine` are a user's.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from compass_jax.config import named
from compass_jax.config.errors import ConfigError
from compass_jax.config.ranges import Range, check_fields

OWN = "compass_jax.rl.objectives"
NAMES = ("grpo", "gspo", "cispo", "espo")
Coefficient = Annotated[float, Range(0, 1000)]


@dataclass(frozen=True)
class Objective:
    """A policy objective: subclass it as a frozen dataclass, whose fields are its settings.

    `rl.objective` in the configuration holds an instance. It is hashable, because it is static in
    jit. The inputs are those of rl/objectives/inputs.py.
    """

    kl_coef: Coefficient = 0.0
    """The KL divergence (k3) from the first policy is a penalty with this factor; 0: none is
    computed.
    """
    router_aux_coef: Coefficient = 0.0
    """The loss that balances the experts' load is added with this factor."""

    @property
    def name(self) -> str:
        """What names this class in config.json and on the command line."""
        cls = type(self)
        if cls.__module__.startswith(OWN + "."):
            return cls.__name__.lower()
        file = getattr(sys.modules[cls.__module__], "__file__", None)
        of_file = cls.__module__.startswith("compass_file_")  # config/named.py read it from there
        return f"{file if of_file else cls.__module__}:{cls.__qualname__}"

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages may be divided by the standard deviation of their group."""
        return True

    def surrogate(self, inputs: Any) -> Any:
        """The `Surrogate` of each token (`PolicyInputs` -> `Surrogate`), to be maximised."""
        raise NotImplementedError(f"{type(self).__name__} has no surrogate(inputs)")

    def weights(self, inputs: Any) -> Any:
        """The weight `[b t]` of each token in the mean (`WeightInputs` -> array)."""
        raise NotImplementedError(f"{type(self).__name__} has no weights(inputs)")

    def groups(self, old_entropy: Any, mask: Any) -> Any:
        """The group `[b t]` of each token within its response, fixed once per rollout; None: the
        objective has none.
        """
        return None

    def validate(self) -> None:
        check_fields(self, "rl.objective")


def default_objective() -> Objective:
    """ESPO with the settings of its paper."""
    return objective_class("espo")()


@functools.cache
def objective_class(name: str) -> type[Objective]:
    """The class that `name` names. ConfigError where there is none, or where it is no frozen
    subclass of `Objective`.
    """
    if name in NAMES:
        return getattr(importlib.import_module(f"{OWN}.{name}"), name.capitalize())
    if ":" not in name:
        raise ConfigError(
            f"rl.objective.name = {name!r}: no such objective; take one of {', '.join(NAMES)}, or"
            " name your own as module:Class or file.py:Class"
        )
    cls = named.load(named.absolute(name), "rl.objective.name")
    if not (isinstance(cls, type) and issubclass(cls, Objective)):
        raise ConfigError(
            f"rl.objective.name = {name!r} is no subclass of compass_jax.config.Objective; derive"
            " it from there"
        )
    params: Any = getattr(cls, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise ConfigError(
            f"rl.objective.name = {name!r} is no frozen dataclass; write @dataclass(frozen=True)"
            " above it"
        )
    for method in ("surrogate", "weights"):
        if getattr(cls, method) is getattr(Objective, method):
            raise ConfigError(f"rl.objective.name = {name!r} has no {method}(inputs); define it")
    return cls
