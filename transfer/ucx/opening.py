"""The door to UCX: settings first, then the import."""

import os
import sys
from typing import TYPE_CHECKING

from transfer.protocol.errors import TransportUnavailable
from transfer.ucx_config import UcxConfig

if TYPE_CHECKING:
    from transfer.ucx.transport import UcxTransport


def open_transport(config: UcxConfig) -> "UcxTransport":
    """This process's UCX transport, listening. Call inside the event loop that will use it, once.

    Raises `TransportUnavailable` when UCX cannot start or was started with other settings.
    """
    config.apply(os.environ, sys.modules)
    try:
        from transfer.ucx.transport import UcxTransport
    except ImportError as error:
        raise TransportUnavailable(f"ucxx cannot be imported: {error}; pip install ucxx-cu13") from error
    return UcxTransport(config)
