"""The identity of one start of a node."""

NodeId = tuple[str, int]
"""Name and incarnation: a restarted node has another id."""
