"""The base class of drafts: earlier answers to a prompt, whose first tokens are accepted instead of
sampled.

The variants are in rollout/drafts.py, or in a user's file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from compass_jax.base.aliases import Inputs, Tree
from compass_jax.config.ranges import Range
from compass_jax.config.seam import Seam

BYTES_PER_TOKEN = 8  # an id and a log-prob


@dataclass(frozen=True)
class Drafts(Seam):
    """Drafts from a prompt's last visit (SPEC-RL, arXiv 2509.23232). Subclasses are frozen
    dataclasses whose fields are its settings.

    `rl.drafts` in the configuration holds an instance, or None: every token is sampled. At a
    prompt's next visit its last answers are scored under the present policy, each in one pass. The
    first tokens that are accepted begin the new answer, with the log-probs, entropies, routes and
    policy version of that pass. The rest is sampled. The inputs are those of rollout/drafts.py.
    """

    key: ClassVar[str] = "rl.drafts"
    classes: ClassVar[dict[str, str]] = {
        "lenient": "compass_jax.rollout.drafts:Lenient",
        "coupled": "compass_jax.rollout.drafts:Coupled",
    }
    required: ClassVar[tuple[str, ...]] = ("accepted",)

    kept_tokens: Annotated[int, Range(1, 2**40)] = 2**24
    """Maximum number of tokens of the drafts that are kept, 8 bytes each in the host's memory; the
    prompts visited longest ago are forgotten first.
    """

    def accepted(self, inputs: Inputs) -> Tree:
        """Returns whether each token is accepted after the ones before it (`DraftInputs` -> bool
        `[n]`). The first token that is not accepted ends a draft.
        """
        raise NotImplementedError(f"{type(self).__name__} has no accepted(inputs)")

    def noise_visit(self, visit: int) -> int | None:
        """Returns the number that keys the sampler's draws at a visit in place of the visit. Only
        answers from visits of the same number become drafts. By default None: draws are keyed as
        without drafts.
        """
        return None
