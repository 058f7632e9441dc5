"""What a rank was in when it died, read by those who held its slip open."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpitp.comm.slip import BYTES, Slip, SlipReader

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="NO NAMELESS MEMORY HERE (not Linux)")

RANK = """\
from mpitp.comm.slip import Slip
slip = Slip()
for number in range(1, 1000):
    slip.begin(number, 10.0 + number, "tp", f"all_reduce [{number}]", "a.py:1 in f")
    slip.end(20.0 + number)
slip.begin(1000, 2000.0, "dp", "barrier []", "b.py:2 in g")
print(slip.place, flush=True)
import time; time.sleep(60)
"""


def test_the_newest_collective_outlives_its_rank() -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    reader = SlipReader(rank.stdout.readline().strip())
    rank.kill()
    rank.communicate()
    assert reader.read() == (1000, "dp", "barrier []", "b.py:2 in g", 2000.0, 0.0)
    reader.close()


def test_begin_and_end() -> None:
    slip = Slip()
    reader = SlipReader(slip.place)
    assert reader.read() is None
    slip.begin(1, 5.0, "tp", "barrier []", "x")
    assert reader.read() == (1, "tp", "barrier []", "x", 5.0, 0.0)
    slip.end(6.0)
    assert reader.read() == (1, "tp", "barrier []", "x", 5.0, 6.0)
    slip.begin(2, 7.0, "tp", "é" * BYTES, "x")  # too long: what is left of it can't be taken for a place
    assert reader.read() is None
    slip.close()
    slip.begin(3, 8.0, "tp", "barrier []", "x")
    with pytest.raises(OSError):
        SlipReader(slip.place)
    reader.close()
