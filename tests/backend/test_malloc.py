from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource, sys
from mpitp.backend.malloc import keep_blocks_in_heap
if sys.argv[1] == "kept":
    assert keep_blocks_in_heap()
import numpy as np
x = np.ones(2**20, "f4")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
x * 2
before = faults()
for _ in range(20):
    x * 2
print(faults() - before)
"""


def page_faults(how: str) -> int:
    """Page faults of 20 temporaries of 4 MiB, in a fresh process."""
    result = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS, how], capture_output=True, text=True, check=True, timeout=60
    )
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_temporaries_cost_no_page_faults() -> None:
    assert page_faults("kept") < 20
    assert page_faults("as it is") > 100


def test_nothing_is_done_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpitp.backend import malloc

    monkeypatch.setattr(malloc.os, "confstr", lambda name: "musl 1.2")
    assert malloc.keep_blocks_in_heap() is False
