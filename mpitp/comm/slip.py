"""A rank's newest collective, to the last moment: in memory that outlives the rank, because others hold it open.

Status files are written every few seconds, too seldom to say where a rank died. This costs 2 us a collective. The
memory has no name: it is found among the open files of the living rank (Linux), and goes with the last who holds it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct

BYTES = 4096
_HEAD = struct.Struct("<qddq")  # number (0: being written), when it was begun and ended (0.0: it isn't), bytes of text
_NUMBER, _ENDED = struct.Struct("<q"), struct.Struct("<d")
_ENDED_AT = 16
_TEXTS_KEPT = 4096


class Slip:
    """What this rank writes. `place`: the path under which others find it, "" where that can't be."""

    def __init__(self) -> None:
        self.place = ""
        self._memory: mmap.mmap | None = None
        self._texts: dict[tuple[object, ...], bytes] = {}
        with contextlib.suppress(AttributeError, OSError):  # not Linux
            self._descriptor = os.memfd_create("mpitp-slip")
            os.posix_fallocate(self._descriptor, 0, BYTES)
            self._memory = mmap.mmap(self._descriptor, BYTES)
            self.place = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def begin(self, number: int, started: float, group: str, call: object, site: str) -> None:
        """A collective begins."""
        if self._memory is None:
            return
        text = self._text(group, call, site)
        _NUMBER.pack_into(self._memory, 0, 0)
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, 0, number, started, 0.0, len(text))

    def end(self, ended: float) -> None:
        """It has ended."""
        if self._memory is not None:
            _ENDED.pack_into(self._memory, _ENDED_AT, ended)

    def close(self) -> None:
        """Nobody finds it any more."""
        if self._memory is not None:
            self._memory.close()
            os.close(self._descriptor)
            self._memory, self.place = None, ""

    def _text(self, group: str, call: object, site: str) -> bytes:
        """Calls of a training step come again and again: their texts are made once."""
        key = (group, call, site)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= _TEXTS_KEPT:
                self._texts.clear()
            text = self._texts[key] = "\0".join((group, str(call), site)).encode()[: BYTES - _HEAD.size]
        return text


class SlipReader:
    """What another process reads, also when the rank has died. Raises OSError where there is nothing to open."""

    def __init__(self, place: str) -> None:
        self._descriptor = os.open(place, os.O_RDONLY)

    def read(self) -> tuple[int, str, str, str, float, float] | None:
        """Number, group, call, site, start and end of the newest collective; None: there was none, or it is torn."""
        content = os.pread(self._descriptor, BYTES, 0)
        if len(content) < BYTES:
            return None
        number, started, ended, length = _HEAD.unpack_from(content)
        parts = content[_HEAD.size : _HEAD.size + max(0, length)].decode(errors="replace").split("\0")
        return (number, parts[0], parts[1], parts[2], started, ended) if number and len(parts) == 3 else None

    def close(self) -> None:
        """Let it go."""
        os.close(self._descriptor)
