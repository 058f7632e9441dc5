"""Errors with exit codes.

Every error a user can cause is one of these. Its message says the rule, what was expected, what came and what to do
about it; the command line prints it once, without a traceback, and ends the job with `exit_code`.
"""

from __future__ import annotations


class MpitpError(Exception):
    """Base of all errors that are shown to the user as one message."""

    exit_code = 1


class UsageError(MpitpError, ValueError):
    """The command line or a call asks for something that can't be (exit code 2)."""

    exit_code = 2


class ConfigError(MpitpError, ValueError):
    """A configuration or a shape is wrong (exit code 3)."""

    exit_code = 3


class PlacementError(ConfigError):
    """A layer is given, along an axis of the mesh, another type of array than it can take (exit code 3)."""

    def __init__(self, problem: str, made_by: str = "", cure: str = "", place: str = "") -> None:
        super().__init__(problem, made_by, cure, place)
        self.problem, self.made_by, self.cure, self.place = problem, made_by, cure, place

    def at(self, place: str) -> PlacementError:
        """The same error, told of the layer `place`, unless an inner layer is named already."""
        return PlacementError(self.problem, self.made_by, self.cure, self.place or place)

    def __str__(self) -> str:
        start = f"{self.place}: " if self.place else ""
        source = f" (made by {self.made_by})" if self.made_by else ""
        return f"{start}{self.problem}{source}{f'; {self.cure}' if self.cure else ''}"


class FileError(MpitpError, ValueError):
    """A checkpoint, a model directory or a data file is missing, damaged or can't be written (exit code 4)."""

    exit_code = 4


class NumericError(MpitpError, ArithmeticError):
    """A loss or a gradient is no longer finite (exit code 5)."""

    exit_code = 5


class LaunchError(MpitpError, RuntimeError):
    """MPI, the launcher, the device or an installed library is not as it must be (exit code 6)."""

    exit_code = 6


class RankKilled(LaunchError):
    """A rank's process was ended from outside (exit code 137, as launchers have it: 128 + SIGKILL)."""

    exit_code = 137


class Preempted(MpitpError):
    """The job was asked to stop and its state is saved (exit code 75, EX_TEMPFAIL: run it again)."""

    exit_code = 75
