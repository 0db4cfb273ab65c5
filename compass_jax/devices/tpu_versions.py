"""The versions of JAX and of the TPU's compiler under which a mixture of experts is trained.

With jax 0.10.2 and libtpu 0.0.42 the weight gradient of `ragged_dot` becomes a dense product over
all experts: of 128 experts 128 times the operations (one backward pass of the 30B: a bound of 27 s
instead of 2 s). jax 0.12 with libtpu 0.0.50 computes each expert's own tokens.
"""

from __future__ import annotations

import re
from importlib import metadata

from compass_jax.base.extras import how_to_install
from compass_jax.config.errors import ConfigError

NEEDED = {"jax": (0, 12), "libtpu": (0, 0, 50)}


def installed() -> dict[str, str]:
    """Package -> version, of those in `NEEDED`; "" for a package that is not installed."""
    versions = {}
    for name in NEEDED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def check_versions(experts: int, versions: dict[str, str] | None = None, remedy: str = "") -> None:
    """Raises ConfigError where a model with `experts` experts a layer would train with an older
    version of the installed packages (or of `versions`). `remedy` ends the message.
    """
    for name, version in (installed() if versions is None else versions).items():
        numbers = tuple(int(x) for x in re.findall(r"\d+", version)[: len(NEEDED[name])])
        if experts and version and numbers < NEEDED[name]:
            needed = ".".join(map(str, NEEDED[name]))
            raise ConfigError(
                f"{name} {version} computes the gradients of all {experts} experts for every token"
                f" on TPUs: install {name}>={needed} (on Python 3.12 or newer:"
                f" {how_to_install('tpu', 'jax', 'libtpu')}){remedy}"
            )
