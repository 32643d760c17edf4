"""UCX through ucxx, which nothing else imports. `open_transport` applies the settings before it does."""

from transfer.ucx.opening import open_transport

__all__ = ["open_transport"]
