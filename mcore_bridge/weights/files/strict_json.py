"""JSON of files that other programs write. An object has each key once, so that all readers read the same."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def parse(data: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: ``data`` is no JSON, is nested too deep, or has a key twice.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:  # its message would show all of the data
        raise ValueError(f"byte {error.start} is not of UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"expected each key once, found {len(twice)} twice: {twice[:5]}")
    return parsed
