"""Compiler settings of the quick tests, which spend most of their time in the compiler.

This module does not import JAX: the settings must be in the environment before JAX is imported.
"""

from collections.abc import Mapping
from importlib.metadata import version

# LLVM compiles fusions one by one, which takes two thirds of the time; without them XLA emits plain
# loops. jaxlib 0.11 no longer has this flag, and an unknown flag ends the process.
FLAG = "--xla_cpu_use_fusion_emitters=false"


def asked(environment: Mapping[str, str], devices: int | None = None) -> dict[str, str]:
    """Returns the variables to set before JAX reads `environment`: few optimisations, unless the
    environment decides otherwise, and `devices` simulated devices.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    if devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    few = environment.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    is_known = version("jaxlib").startswith("0.10.")
    if few == "1" and is_known and FLAG not in flags:
        flags.append(FLAG)
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": few, "XLA_FLAGS": " ".join(flags)}
