"""Tests that share something slow to make run on one worker; all others on any."""

import pytest

SLOW = ("reports", "long_page", "healthy", "search")


def pytest_collection_modifyitems(items):
    for item in items:
        for made in set(SLOW).intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(made))
