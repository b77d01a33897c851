"""The episodes that every trainer gets, and the model that sampled them. Imports wait: trackers run without PyTorch."""

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder):
    from trainers import paper

    return paper.tiny_model(folder)


@pytest.fixture(scope="module")
def episodes(reference):
    from trainers import paper

    return paper.episodes(reference)
