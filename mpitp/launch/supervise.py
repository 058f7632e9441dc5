"""What a launcher has to know of a training run that it starts: how it stops, and where it writes."""

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
