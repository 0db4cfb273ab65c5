"""The base class of corrections of the mismatch between rollout and training.

The corrections are in rl/corrections/, one file each, or in a user's file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compass_jax.base.aliases import Inputs, Json, Tree
from compass_jax.config.errors import check
from compass_jax.config.seam import Seam, seam_class


@dataclass(frozen=True)
class Correction(Seam):
    """A correction. Subclasses are frozen dataclasses whose fields are its settings.

    `rl.correction` in the configuration holds an instance. The inputs are those of
    rl/corrections/inputs.py.
    """

    key: ClassVar[str] = "rl.correction"
    classes: ClassVar[dict[str, str]] = {
        "off": "compass_jax.rl.corrections.off:NoCorrection",
        "tis": "compass_jax.rl.corrections.tis:Tis",
        "icepop": "compass_jax.rl.corrections.icepop:IcePop",
        "sequence": "compass_jax.rl.corrections.sequence:SequenceMask",
    }
    required: ClassVar[tuple[str, ...]] = ("weights",)
    acts: ClassVar[bool] = True  # False: every weight is 1, and no log-probs are computed

    def weights(self, inputs: Inputs) -> Tree:
        """Returns the weight `[b t]` of each token outside the clip (`CorrectionInputs` -> array).

        It carries no gradient, and only values inside the mask are used. A dropped token has weight
        0; the normaliser does not change.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights(inputs)")


def named_correction(name: str, **settings: Json) -> Correction:
    """Returns the correction `name` ("off", "tis", "icepop", "sequence", or a user's own)."""
    return seam_class(Correction, name)(**settings)


def check_encloses_one(key: str, ratio_range: tuple[float, float]) -> None:
    """Raises ConfigError for a range of ratios that excludes 1 or is not positive."""
    low, high = ratio_range
    check(
        0 < low < 1 < high,
        f"{key}.ratio_range = {low, high}: must enclose 1, its lower end positive",
    )
