"""The allocator keeps what a program frees, in the process that was started."""

import subprocess
import sys

import pytest

FAULTS = """
import os, resource
{tune}
import numpy as np

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

np.ones(2**23).sum()  # 64 MiB, twice the largest threshold that glibc takes by itself
before = faults()
for _ in range(10):
    np.ones(2**23).sum()
print(faults() - before, os.getpid())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has these options")
def test_arrays_that_are_freed_and_allocated_again_cost_no_page_faults():
    counts = {}
    for tune in ("", "from compass_jax.devices.allocator import tune_allocator; tune_allocator()"):
        code = [sys.executable, "-c", FAULTS.format(tune=tune)]
        with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as process:
            faults, pid = map(int, process.communicate(timeout=60)[0].split())
            assert pid == process.pid  # a debugger or profiler keeps its process
        counts[tune] = faults
    without, tuned = counts.values()
    assert tuned < without / 10
