"""The tests of a family run on one worker: a tokenizer takes half a second to load."""

import pytest

from support.families import FAMILIES


def pytest_collection_modifyitems(items):
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("family") in FAMILIES:
            item.add_marker(pytest.mark.xdist_group(parameters["family"]))
