"""Lanes of a connection: the transports and devices that UCX chose among those allowed. ucxx does not report them.

Calls `ucp_ep_query` of the library that ucxx has loaded. Source: ucp.h of UCX 1.21, ucp_ep_attr_t.
"""

import ctypes

_FIELD_TRANSPORTS = 1 << 3
_MAX_LANES = 16


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _EndpointAttributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_byte * 128),
        ("remote_sockaddr", ctypes.c_byte * 128),
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


def endpoint_lanes(endpoint_handle: int) -> tuple[str, ...]:
    """Sorted names such as `("tcp/eth0",)`, without the lane that only connects; empty when the query fails."""
    entries = (_Entry * _MAX_LANES)()
    attributes = _EndpointAttributes(
        field_mask=_FIELD_TRANSPORTS,
        entries=entries,
        num_entries=_MAX_LANES,
        entry_size=ctypes.sizeof(_Entry),
    )
    query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    if query(ctypes.c_void_p(endpoint_handle), ctypes.byref(attributes)) != 0:
        return ()
    used = {(lane.transport.decode(), lane.device.decode()) for lane in entries[: attributes.num_entries]}
    return tuple(sorted(f"{transport}/{device}" for transport, device in used if device))
