"""A pytest plugin for Strands' tests: puts `SGLangModel` in the place of their models, and leaves out what is listed.

`left_out.json` has folders, files and tests by what their ids begin with, and for each the reason. An entry that leaves
out nothing is an error, so that the list stays true.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strands.agent.agent
import strands.event_loop.event_loop as event_loop
import strands.models.bedrock

from strands_sglang.model.model import AuxiliaryModel
from support.strands_own.brain import BrainModel, CloudModel

HERE = Path(__file__).parent
LEFT_OUT: dict[str, str] = json.loads((HERE / "left_out.json").read_text(encoding="utf-8"))
ANSWERS: dict[str, list[str]] = json.loads((HERE / "cloud_answers.json").read_text(encoding="utf-8"))
CLOUD_TESTS = "tests_integ"

# A simulation of AWS, which their conftest file imports and no test uses that is run.
_moto: Any = types.ModuleType("moto")
_moto.mock_aws = contextlib.nullcontext
sys.modules.setdefault("moto", _moto)

_brains: dict[int, tuple[Any, BrainModel]] = {}


def brain_of(model: Any) -> Any:
    """The `SGLangModel` that gives the answers of a test's own model; that of a test as it is."""
    if isinstance(model, BrainModel | AuxiliaryModel):
        return model
    if id(model) not in _brains:
        _brains[id(model)] = model, BrainModel(model)
    return _brains[id(model)][1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--own-models", action="store_true", help="run with Strands' own models, to compare")
    parser.addoption("--all-tests", action="store_true", help="run what is left out, too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("own_models"):
        return
    if any(argument.startswith(CLOUD_TESTS) for argument in config.args):
        for module in (strands.agent.agent, strands.models, strands.models.bedrock):
            module.BedrockModel = CloudModel
        return
    stream_messages = event_loop.stream_messages

    def with_brain(model: Any, *args: Any, **kwargs: Any) -> Any:
        return stream_messages(brain_of(model), *args, **kwargs)

    event_loop.stream_messages = with_brain
    from tests.fixtures import mocked_model_provider  # Strands' own

    stand_in = mocked_model_provider.MockedModelProvider

    class MockedModelProvider(BrainModel):
        """Strands' scripted model, as the brain of an `SGLangModel`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(stand_in(*args, **kwargs))

        @property
        def index(self) -> int:
            return self.brain.index

        @index.setter
        def index(self, index: int) -> None:
            self.brain.index = index

        def __getattr__(self, name: str) -> Any:
            if name == "brain":
                raise AttributeError(name)
            return getattr(self.brain, name)

    mocked_model_provider.MockedModelProvider = MockedModelProvider


@pytest.fixture(autouse=True)
def _brains_of_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    CloudModel.answers[:] = ANSWERS.get(request.node.nodeid, [])
    yield
    _brains.clear()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("all_tests"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if path in LEFT_OUT else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("all_tests"):
        return
    listed = [entry for entry in LEFT_OUT if "::" in entry]
    left_out = [item for item in items if any(_is_of(item.nodeid, entry) for entry in listed)]
    suite = CLOUD_TESTS if any(argument.startswith(CLOUD_TESTS) for argument in config.args) else "tests"
    whole_run = config.args == [suite] and not any("::" in argument for argument in config.args)
    listed = [entry for entry in listed if entry.startswith(f"{suite}/")]
    stale = [entry for entry in LEFT_OUT if not (config.rootpath / entry.partition("::")[0]).exists()]
    stale += [entry for entry in listed if not any(_is_of(item.nodeid, entry) for item in left_out)]
    if whole_run and stale:
        raise pytest.UsageError(f"left_out.json names what is not there: {stale}")
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_of(nodeid: str, entry: str) -> bool:
    return nodeid == entry or nodeid.startswith((f"{entry}[", f"{entry}::"))
