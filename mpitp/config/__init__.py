"""What a run file says: what to train, on what, and how; checked whole before anything is computed.

Each section is a frozen dataclass that checks its own values when it is made, so a configuration built in Python is
held to the same rules as one read from a file. Every key's meaning stands beside its type; `key_table()` prints them.

    rules.py     what a value must satisfy beyond its type
    values.py    a value in the type of its key
    section.py   a section that checks itself
    sections.py  the keys
    run.py       the run as a whole
    table.py     the keys, printed
"""

from mpitp.config.rules import AT_LEAST_1, NOT_EMPTY, RECOMPUTE, Rule, duration_seconds, one_of
from mpitp.config.run import SECTIONS, RunConfig, run_config_from
from mpitp.config.section import Section, key, keys_of, make_section
from mpitp.config.sections import (
    ACTIVATIONS,
    ACTIVATIONS_HELP,
    DTYPES,
    CheckpointSection,
    DataSection,
    DropoutSection,
    MeshSection,
    ModelSection,
    OptimSection,
    TaskSection,
    TrainSection,
)
from mpitp.config.table import key_table
from mpitp.config.values import MOST_WHOLE, SHARED_AXES, Table

__all__ = [
    "AT_LEAST_1",
    "ACTIVATIONS",
    "ACTIVATIONS_HELP",
    "DTYPES",
    "MOST_WHOLE",
    "NOT_EMPTY",
    "RECOMPUTE",
    "SECTIONS",
    "SHARED_AXES",
    "CheckpointSection",
    "DataSection",
    "DropoutSection",
    "MeshSection",
    "ModelSection",
    "OptimSection",
    "Rule",
    "RunConfig",
    "Section",
    "Table",
    "TaskSection",
    "TrainSection",
    "duration_seconds",
    "key",
    "key_table",
    "keys_of",
    "make_section",
    "one_of",
    "run_config_from",
]
