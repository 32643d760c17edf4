"""gRPC's options for the connections of the control plane. Imports no gRPC: settings have their defaults from here."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20  # a prompt of a million tokens takes 3 MiB, and scores travel in parts

CONTROL_SILENCE_S = 1.0
"""Default of `control_silence_s`: how long a peer may leave a ping unanswered before its connection counts as lost."""

PING_AFTER_S = 1.0  # without data; gRPC pings no sooner


def connection_options(silence_s: float) -> tuple[tuple[str, int], ...]:
    """Options for both ends of a connection, so that nodes and callers detect each other's end equally fast."""
    silence_ms = round(silence_s * 1e3)
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A peer that stops without closing its connection (a pulled cable, SIGSTOP) is detected by the ping that it
        # does not answer. ping_timeout_ms is the wait for that answer, a minute by default (gRPC 1.85);
        # keepalive_timeout_ms is the kernel's TCP_USER_TIMEOUT, which for a new call runs at once. gRPC's own threads
        # answer pings, whatever the node computes.
        ("grpc.keepalive_time_ms", round(PING_AFTER_S * 1e3)),
        ("grpc.keepalive_timeout_ms", silence_ms),
        ("grpc.http2.ping_timeout_ms", silence_ms),
        ("grpc.http2.max_pings_without_data", 0),
    )


def channel_options(silence_s: float) -> tuple[tuple[str, int], ...]:
    """Options for the calling end of a connection."""
    return (
        *connection_options(silence_s),
        # Reconnect to a restarted node soon: the default backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # How long connecting may take, 20 s by default. A stopped process's kernel accepts the connection, and calls
        # would wait for it as long.
        ("grpc.min_reconnect_backoff_ms", round((PING_AFTER_S + silence_s) * 1e3)),
        # How much of a stream may wait here unread before its node is held up: by default gRPC measures the link and
        # then takes 4 MiB, 40,000 tokens. A message that is longer than the window still comes whole.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 16 << 10),
    )
