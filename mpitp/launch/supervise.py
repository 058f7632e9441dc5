"""What a launcher has to know of a job that it starts: which signals stop it in order, and where a run writes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mpitp.config import TrainSection
from mpitp.errors import MpitpError
from mpitp.paths import path_option
from mpitp.run_file import load_run_config


def training(words: Sequence[str]) -> TrainSection | None:
    """How `train RUN.TOML ...` trains; None for other verbs and for what the verb itself will refuse."""
    if not words or words[0] != "train":
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run_file", type=path_option)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume")
    parser.add_argument("--trace")
    try:
        known, _ = parser.parse_known_args(list(words[1:]))
        return load_run_config(known.run_file, known.set).train
    except (MpitpError, argparse.ArgumentError, SystemExit):
        return None


def heeded_signals(words: Sequence[str], settings: TrainSection | None) -> Sequence[str]:
    """Names ("TERM", ...) of the signals on which the job ends in order: a run saves, a server finishes its texts."""
    from mpitp.serve.command import STOP_SIGNALS

    if settings is not None:
        return settings.signals
    return STOP_SIGNALS if words and words[0] == "serve" else ()
