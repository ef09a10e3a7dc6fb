"""A fixture for tests whose workers an engine changes."""

from collections.abc import Iterator

import pytest

from tests.support import pool


@pytest.fixture(scope="module")
def own_workers() -> Iterator[None]:
    """Ends the workers after the tests of a module, since an engine changes a process permanently."""
    yield
    pool._stop(dump=False)
