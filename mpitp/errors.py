"""Errors with exit codes.

Every error a user can cause is one of these. Its message says the rule, what was expected, what came and what to do
about it; the command line prints it once, without a traceback, and ends the job with `exit_code`.
"""


class MpitpError(Exception):
    """Base of all errors that are shown to the user as one message."""

    exit_code = 1


class UsageError(MpitpError, ValueError):
    """The command line or a call asks for something that can't be (exit code 2)."""

    exit_code = 2


class ConfigError(MpitpError, ValueError):
    """A configuration or a shape is wrong (exit code 3)."""

    exit_code = 3


class FileError(MpitpError, ValueError):
    """A checkpoint, a model directory or a data file is missing, damaged or can't be written (exit code 4)."""

    exit_code = 4


class NumericError(MpitpError, ArithmeticError):
    """A loss or a gradient is no longer finite (exit code 5)."""

    exit_code = 5


class LaunchError(MpitpError, RuntimeError):
    """MPI, the launcher or the device is not as it must be (exit code 6)."""

    exit_code = 6


class RankKilled(LaunchError):
    """A rank's process was ended from outside (exit code 137, as launchers have it: 128 + SIGKILL)."""

    exit_code = 137


class Preempted(MpitpError):
    """The job was asked to stop and its state is saved (exit code 75, EX_TEMPFAIL: run it again)."""

    exit_code = 75
