"""What MPICH tells its launcher at the start fits into the lines that SLURM reads."""

import os
import re
import subprocess
import sys

import pytest

from tests.launch.test_launch_faults import MPIEXEC, needs_mpiexec

LONGEST = 1000  # SLURM reads 1,024; a job's name there is shorter than under mpiexec, other things may be longer
PROGRAM = """
import ctypes, os, random, sys
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
chance = random.Random(1)
text = os.urandom(1 << 16).replace(b"\\0", b"x")
pieces = []
for number in range(8000):  # a heap of which most is free, and full of what was there before
    size = chance.choice([40, 100, 200, 400, 800, 2000, 5000])
    pieces.append(libc.malloc(size))
    ctypes.memmove(pieces[-1], text[number : number + size], size)
chance.shuffle(pieces)
for piece in pieces[:6400]:
    libc.free(piece)
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from mpitp.comm.fresh_memory import fresh_memory
with fresh_memory(sys.argv[1], {"PMI_FD": "5", "SLURM_PROCID": "0"}):
    MPI.Init_thread()
assert MPI.COMM_WORLD.allreduce(1) == 2
pieces = [libc.malloc(800) for _ in range(1000)]  # the heap is whole
"""


@needs_mpiexec
@pytest.mark.parametrize(("library", "fits"), [("MPICH 5.0.2", True), ("another", False)])
def test_lines_of_the_start(library: str, fits: bool) -> None:
    """Without fresh memory the lines are longer: were they not, there would be nothing to keep out."""
    words = [str(MPIEXEC), "-verbose", "-n", "2", sys.executable, "-c", PROGRAM, library]
    environ = {**os.environ, "MPIR_CVAR_NUM_CLIQUES": "2"}  # two nodes, as far as the start goes
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ, check=False, errors="replace")
    assert done.returncode == 0, done.stderr[-2000:]
    lengths = [len(line) for line in re.findall(r"cmd=put kvsname=.*", done.stdout + done.stderr)]
    assert lengths, "MPICH's mpiexec doesn't show what ranks tell it"
    assert (max(lengths) < LONGEST) is fits
