"""A fixture for tests whose workers an engine changes."""

from collections.abc import Iterator

import pytest

from tests.support import pool


@pytest.fixture(scope="module")
def own_workers() -> Iterator[None]:
    """Ends the workers after the tests of a module: what an engine changes in a process lasts as long as that."""
    yield
    pool._stop(dump=False)
