"""Switches the roles of nodes at run time, for an operator or a planner."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from headrace.wire.errors import NodeError
from headrace.wire.node_messages import Role
from router.cluster.nodes import NodeEntry, NodeTable
from router.errors import ApiError

TIMEOUT_S = 10.0
"""For the node's answer. The call touches no engine: a node that takes longer stands still, and gets no processor
for seconds on a busy host only."""


class RoleSwitch:
    """Switches one node after the other. A role is a row in the table: new requests see it at once, and those that run
    end where they are. The node keeps it, and reports it to the other routers at once."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._switching = asyncio.Lock()

    async def switch(self, name: str, role: Role) -> None:
        """Returns once the node has confirmed its role.

        Raises ApiError: 404 for a node that is not registered, 409 when nobody would be left to decode, 503 for a node
        that does not answer.
        """
        async with self._switching:
            node = self._nodes.named(name)
            if node is None:
                message = f"no node {name!r} is registered; see /cluster for those that are"
                raise ApiError(HTTPStatus.NOT_FOUND, message, code="node_not_found")
            self._check_decoders(node, role)
            try:
                async with self._nodes.in_use(node) as client:
                    node.switched(role, await client.switch_role(role, timeout_s=TIMEOUT_S))
            except NodeError as error:
                message = f"node {error}; its role is what its next heartbeat says"
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="node_lost", retry_after_s=2) from error

    def _check_decoders(self, node: NodeEntry, role: Role) -> None:
        others = any(other is not node for other in self._nodes.live(Role.DECODE))
        if not self._nodes.does(role, Role.DECODE) and not others:
            message = (
                f"no other node decodes than {node.info.name}, and roles are fixed: switch another one first, or set "
                "roles to elastic in the router's config"
            )
            raise ApiError(HTTPStatus.CONFLICT, message, code="last_decode_node")
