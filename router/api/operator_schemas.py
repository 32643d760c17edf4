"""The bodies of the operator's requests, as /openapi.json describes them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from router.api.body_schemas import Body


class RoleBody(Body):
    """A node's new role."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["prefill", "decode", "both"]
    """The work for which the node is preferred from now on."""


class DrainBody(Body):
    """How a node is drained."""

    model_config = ConfigDict(extra="forbid")

    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds after which requests that could not move begin again on other nodes."""
    keep: bool = False
    """The node stays, without work; else it stops."""
