"""Errors of the `headrace` command."""

from __future__ import annotations


class DeployError(Exception):
    """Root of this package's errors; the command prints the message and exits with status 1."""


class AlreadyRunning(DeployError):
    """A cluster of this name runs on this machine."""


class NotRunning(DeployError):
    """No cluster of this name runs on this machine."""


class StartFailed(DeployError):
    """The cluster did not come up; everything that had started was stopped."""


class StopRequested(DeployError):
    """SIGINT or SIGTERM arrived before the command was done."""

    def __init__(self) -> None:
        super().__init__("stopped by a signal")


class RequestFailed(DeployError):
    """The router answered with an error, or not at all."""
