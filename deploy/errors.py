"""Errors of the `headrace` command."""

from __future__ import annotations


class DeployError(Exception):
    """Root of this package's errors; the command prints the message and exits with status 1."""


class AlreadyRunning(DeployError):
    """A cluster of this name runs on this machine."""


class NotRunning(DeployError):
    """No cluster of this name runs on this machine."""


class FolderUnusable(DeployError):
    """A folder for records, logs or sockets cannot be read or written."""


class StartFailed(DeployError):
    """The cluster did not come up; everything that had started was stopped."""


class RayFailed(DeployError):
    """Ray itself failed under a cluster: its processes, or the connection to them."""


class StopRequested(DeployError):
    """SIGINT or SIGTERM arrived before the command was done."""

    def __init__(self) -> None:
        super().__init__("stopped by a signal")


class RequestFailed(DeployError):
    """The router answered with an error, or not at all."""


def first_line(error: BaseException) -> str:
    """The beginning of an error's text, which is many lines where it comes from Ray."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
