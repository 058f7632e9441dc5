"""Looking where threads stand, while garbage is collected and threads begin and end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mpitp
from mpitp.comm.frames import frame_of

LOOK = """
import gc, sys, threading, time
from mpitp.comm.frames import frame_of

gc.callbacks.append(lambda phase, info: time.sleep(0.001))  # lets other threads run, as a finalizer may
gc.set_threshold(1)
ident = threading.get_ident()
LOOKS = {"ours": lambda: frame_of(ident), "plain": lambda: sys._current_frames().get(ident)}

end = time.monotonic() + 1.0

def look():
    while time.monotonic() < end:
        assert LOOKS[sys.argv[1]]() is not None

def deep(calls):
    deep(calls - 1) if calls else look()

threads = [threading.Thread(target=deep, args=(9,)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
print("looked")
"""


def test_no_deadlock_with_collections_and_threads() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK, "ours"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "looked\n", done.stderr


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_meanwhile(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was switched off before stays so."""
    look, seen = sys._current_frames, []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or look())
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert frame_of(threading.get_ident()) is not None
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if before else gc.disable)()


def test_nobody_looks_in_another_way() -> None:
    package = Path(mpitp.__file__).parent
    lookers = [path.name for path in package.rglob("*.py") if "_current_frames()" in path.read_text(encoding="utf-8")]
    assert lookers == ["frames.py"]


def test_the_frame_of_a_thread_and_of_none() -> None:
    told, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        told.set()
        go_on.wait()

    thread = threading.Thread(target=stand)
    thread.start()
    told.wait()
    frame, names = frame_of(thread.ident), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    go_on.set()
    thread.join()
    assert "stand" in names
    assert frame_of(None) is None and frame_of(thread.ident) is None
