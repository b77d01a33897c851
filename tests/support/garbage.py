"""The garbage collector in tests of what is collected."""

import gc

import pytest


@pytest.fixture
def small_heap():
    """Hides from the collector what there is before the test, which would take it a second to walk."""
    gc.freeze()
    yield
    gc.unfreeze()
