"""JSON of files that others write: each key of an object is there once, so that all readers read the same."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def parse(data: bytes) -> Any:
    """What JSON in UTF-8 says.

    Raises:
        ValueError: it is none, is nested too deep, or has a key twice.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:  # which would show all of it
        raise ValueError(f"byte {error.start} is not of UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"expected each key once, found {len(twice)} twice: {twice[:5]}")
    return found
