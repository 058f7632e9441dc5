r"""A launched program some of whose words its launcher would take for its own.

To mpiexec and srun a word `:` ends one program and begins another. `quoted` writes it as `\:`, and this module, run as
`python -m mpitp.launch.quoted MODULE WORDS...`, takes the backslash away again before MODULE begins.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence

_COLON = re.compile(r"\\*:")


def needs_quotes(words: Sequence[str]) -> bool:
    """Whether a launcher would misread one of the words."""
    return ":" in words


def quoted(words: Sequence[str]) -> list[str]:
    """The words as a launcher leaves them alone."""
    return [f"\\{word}" if _COLON.fullmatch(word) else word for word in words]


def unquoted(words: Sequence[str]) -> list[str]:
    """The words as they were before `quoted`."""
    return [word[1:] if _COLON.fullmatch(word) else word for word in words]


if __name__ == "__main__":
    module = sys.argv[1]
    sys.argv[1:] = unquoted(sys.argv[2:])
    runpy.run_module(module, run_name="__main__", alter_sys=True)
