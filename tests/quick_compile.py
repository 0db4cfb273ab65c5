"""How the quick tests compile: most of a test's time is the compiler's.

No import of JAX: what is said here must be said before it.
"""

from collections.abc import Mapping
from importlib.metadata import version

# Fusions that LLVM compiles one by one take two thirds of it; without them XLA emits plain loops.
# An unknown flag ends the process, and jaxlib 0.11 no longer knows this one.
FLAG = "--xla_cpu_use_fusion_emitters=false"


def asked(environment: Mapping[str, str], devices: int | None = None) -> dict[str, str]:
    """What to set in `environment` before JAX reads it: few optimisations, unless it says
    otherwise, and so many simulated devices.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    if devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    few = environment.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    is_known = version("jaxlib").startswith("0.10.")
    if few == "1" and is_known and FLAG not in flags:
        flags.append(FLAG)
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": few, "XLA_FLAGS": " ".join(flags)}
