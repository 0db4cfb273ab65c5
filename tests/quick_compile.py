"""How the quick tests compile: most of a test's time is the compiler's.

No import of JAX: what is said here must be said before it.
"""

from collections.abc import MutableMapping

# Fusions that LLVM compiles one by one take two thirds of it; without them XLA emits plain loops.
FLAG = "--xla_cpu_use_fusion_emitters=false"


def ask(environment: MutableMapping[str, str], devices: int | None = None) -> None:
    """Sets what JAX reads at its start in `environment`: few optimisations, unless it says
    otherwise, and so many simulated devices.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    if devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    if environment.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1" and FLAG not in flags:
        flags.append(FLAG)
    environment["XLA_FLAGS"] = " ".join(flags)
