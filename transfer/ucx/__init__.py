"""UCX through ucxx, which only this package imports. `open_transport` applies the settings before that import."""

from transfer.ucx.config import UcxConfig, open_transport

__all__ = ["UcxConfig", "open_transport"]
