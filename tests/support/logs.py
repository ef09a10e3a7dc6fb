"""What the library logs."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def messages_of() -> Iterator[list[str]]:
    """The messages that the library logs in the block."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_bridge").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("mcore_bridge").removeHandler(handler)
