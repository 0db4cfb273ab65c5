"""Flags of the TPU's compiler, which libtpu reads from the environment when it starts.

Without them a collective of the training step holds the TensorCore: it starts, and ends, before
the next operation. On chips with SparseCores they send it while the TensorCore computes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "LIBTPU_INIT_ARGS"
_ASYNC = ("xla_enable_async_all_gather",)
_SPARSE_CORE = (
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    "xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all",
    "xla_tpu_use_tc_device_shape_on_sc",
    "xla_sc_disable_megacore_partitioning",
)
# generation -> the flags that are true; v5e has no SparseCore
FLAGS: Mapping[str, tuple[str, ...]] = {
    "v5e": _ASYNC,
    "v5p": _ASYNC + _SPARSE_CORE,
    "v6e": _ASYNC + _SPARSE_CORE,
    "tpu7x": _ASYNC + _SPARSE_CORE,
}
# The TPU's compiler runs on the CPU. It reads the machine from the environment, or from a cloud's
# metadata servers if that is unset.
COMPILER_ALONE = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
}
_PCI_VENDOR = "0x1ae0"
_PCI_DEVICES = {"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}


def set_flags(generation: str) -> None:
    """Sets the flags of a generation of TPUs. Does nothing for one outside FLAGS, and if the
    variable is set, even to an empty text.

    Call it before libtpu is loaded. libtpu ends the process at a flag that it does not know.
    """
    if flags := FLAGS.get(generation, ()):
        os.environ.setdefault(VARIABLE, " ".join(f"--{flag}=true" for flag in flags))


def compile_alone(topology: str) -> None:
    """Prepares the process to compile for a topology such as v5p:4x4x4 on the CPU, with the flags
    of a run there. Call it before jax is imported, which on a TPU VM sets the variables itself.
    """
    os.environ.update(COMPILER_ALONE)
    set_flags(topology.partition(":")[0])


def attached_generation(devices: str | os.PathLike = "/sys/bus/pci/devices") -> str:
    """Returns the generation of this machine's TPUs, such as v5p; empty without TPUs of FLAGS."""
    for folder in sorted(Path(devices).glob("*")):
        try:
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _PCI_VENDOR and device in _PCI_DEVICES:
            return _PCI_DEVICES[device]
    return ""
