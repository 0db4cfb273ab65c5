"""Calls of a step policy, whose answers are checked: a policy may be a user's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.config import StepPolicy
from compass_jax.config.seam import ComponentFailed
from compass_jax.config.step_policy import GroupKey
from compass_jax.experience.step_policies.inputs import StepInputs

T = TypeVar("T")
MAX_DRAWN = 1000  # prompts of a step, in multiples of rl.prompts_per_step


class Decision(NamedTuple):
    """A step policy's decision on the open groups."""

    chosen: list[GroupKey]  # trained on in this step
    dropped: list[GroupKey]  # trained on in no step
    state: JsonObject  # the policy's state afterwards
    counts: dict[str, float]  # the policy's metrics of the decision


@dataclass(frozen=True)
class PolicyCalls:
    """The methods of a policy, applied to the samples in flight. Each raises ComponentFailed for
    an answer that cannot be used.
    """

    policy: StepPolicy
    inputs: StepInputs

    def missing_prompts(self) -> int:
        """Returns how many prompts to draw now."""
        n, inputs = self._call("missing", self.policy.missing, self.inputs), self.inputs
        # True is an int for Python.
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise self._error("missing", f"returned {n!r:.200}; it must be a number of prompts")
        in_flight = len(inputs.open) + len(inputs.buffer.kept) + n
        most = inputs.sampling.groups_in_flight
        if in_flight > most:
            raise self._error(
                "missing",
                f"returned {n}: {in_flight} groups would be in flight, and groups_in_flight allows"
                f" {most}; return fewer, or a larger number there",
            )
        # A policy that chooses none of its groups would draw prompts for ever, so the message names
        # `chosen`.
        limit = MAX_DRAWN * inputs.sampling.prompts_per_step
        if inputs.drawn + n > limit:
            raise self._error(
                "chosen",
                f"left the step without {inputs.needed} of its {inputs.sampling.prompts_per_step}"
                f" groups after {inputs.drawn} prompts; let it choose others when prompts run out",
            )
        return n

    def sizes(self) -> dict[GroupKey, int]:
        """Returns how many samples each open group should have."""
        return {key: self._size(key) for key in self.inputs.open}

    def decision(self, progress: bool) -> Decision:
        """Returns the decision on the open groups.

        `progress` is whether prompts were drawn or samples ran since the last one. Without it, and
        without a group chosen or dropped, the step would never end.
        """
        policy, inputs = self.policy, self.inputs
        chosen = self._groups("chosen", policy.chosen, inputs)
        if len(chosen) > inputs.needed:
            message = f"returned {len(chosen)} groups; the step needs {inputs.needed} more"
            raise self._error("chosen", message)
        dropped = self._groups("dropped", policy.dropped, inputs, chosen)
        if overlap := set(chosen) & set(dropped):
            raise self._error("dropped", f"returned {min(overlap)}, which chosen returned, too")
        if not (progress or chosen or dropped):
            raise self._error(
                "missing",
                f"returned 0 and chosen no group, while the step needs {inputs.needed} more: it"
                " would never end; draw prompts or choose other groups",
            )
        state = self._call("next_state", policy.next_state, inputs, chosen)
        counts = self._call("counts", policy.counts, inputs, chosen)
        return Decision(chosen, dropped, self._json(state), self._numbers(counts))

    def _size(self, key: GroupKey) -> int:
        size, most = self._call("grow", self.policy.grow, self.inputs, key), self._capacity
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
            raise self._error(
                "grow",
                f"returned {size!r:.200}; it must be in 1..{most}, the larger of rl.group_size and"
                " rl.zero_variance.grow_to",
            )
        return size

    @property
    def _capacity(self) -> int:
        return self.inputs.sampling.capacity

    def _groups(
        self, method: str, function: Callable[..., Sequence[GroupKey]], *args: Any
    ) -> list[GroupKey]:
        """Returns the groups that a method names: open and complete ones, each once."""
        groups, buffer = list(self._call(method, function, *args)), self.inputs.buffer
        is_open = set(self.inputs.open)
        for key in groups:
            if key not in is_open:
                raise self._error(method, f"returned {key!r:.200}, which is no open group")
            if not buffer.done(key, self._size(key)):
                raise self._error(
                    method, f"returned {key}, which is not complete; take inputs.complete"
                )
        if len(set(groups)) < len(groups):
            raise self._error(method, "returned a group twice")
        return groups

    def _numbers(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics as floats by name."""
        try:
            numbers = {str(name): float(value) for name, value in counts.items()}
        except (AttributeError, TypeError, ValueError) as error:
            message = f"returned {counts!r:.200}; it must be numbers by name"
            raise self._error("counts", message) from error
        if wrong := [name for name, value in numbers.items() if not math.isfinite(value)]:
            raise self._error("counts", f"returned {numbers[wrong[0]]} for {wrong[0]!r:.200}")
        return numbers

    def _json(self, state: JsonMapping) -> JsonObject:
        """Returns the state as the checkpoint will have it."""
        # A resumed policy gets its state from JSON, which turns a tuple into a list. A policy that
        # was not interrupted must see the same state.
        try:
            return json.loads(json.dumps(dict(state), allow_nan=False))
        except (TypeError, ValueError) as error:
            message = f"returned {state!r:.200}: a checkpoint cannot hold it as JSON ({error})"
            raise self._error("next_state", message) from error

    def _call(self, method: str, function: Callable[..., T], *args: Any) -> T:
        with self.policy.calling(method):
            return function(*args)

    def _error(self, method: str, message: str) -> ComponentFailed:
        return ComponentFailed(f"rl.step_policy.name = {self.policy.name!r}: {method} {message}")
