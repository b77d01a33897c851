"""A pytest plugin that runs Strands' tests with `SGLangModel` instead of their models, and skips listed tests.

A test's scripted model only chooses the response. It is called first, with the arguments that `SGLangModel` received.
Its stream becomes the text that a scripted server samples, so the response passes through the whole model: prompt,
request, record, parser and stream events. Events that no such server could produce (a guardrail's redaction, another
provider's citations) are passed through unchanged.

`left_out.json` lists folders, files and tests by the start of their ids, each with a reason. An entry that matches no
test is an error.
"""

import contextlib
import json
import sys
import types
from collections import Counter
from contextvars import ContextVar
from pathlib import Path

import pytest
import strands.agent.agent
import strands.event_loop.event_loop as event_loop
import strands.models.bedrock

from strands_sglang.model.model import AuxiliaryModel, SGLangModel
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import build_chatml_tokenizer

HERE = Path(__file__).parent
LEFT_OUT = json.loads((HERE / "left_out.json").read_text(encoding="utf-8"))
ANSWERS = json.loads((HERE / "cloud_answers.json").read_text(encoding="utf-8"))
CLOUD_TESTS = "tests_integ"

# Strands' conftest imports this simulation of AWS, but no test that runs here uses it.
_moto = types.ModuleType("moto")
_moto.mock_aws = contextlib.nullcontext
sys.modules.setdefault("moto", _moto)

_FINISH_REASONS = {"end_turn": "stop", "tool_use": "stop", "max_tokens": "length"}

# The response to the running call; a context variable, since some tests call one model from two threads.
_next = ContextVar("next")


class BrainModel(SGLangModel):
    """An `SGLangModel` whose responses come from another model.

    Attributes:
        brain: Model that chooses the responses.
    """

    def __init__(self, brain):
        self.brain = brain
        self._sampled_ids = {}  # the sampled ids by the script's id, which may repeat
        server = ScriptedSGLang(build_chatml_tokenizer(), lambda request: _next.get(), context_length=10_000_000)
        super().__init__(tokenizer=build_chatml_tokenizer(), client=server.client())

    async def stream(self, messages, tool_specs=None, system_prompt=None, tool_choice=None, **kwargs):
        kwargs["tool_choice"] = tool_choice
        signal = kwargs.get("cancel_signal")
        cancelled = signal is not None and signal.is_set()  # then no request is made and no response is used
        asked = self.brain.stream(messages, tool_specs, system_prompt, **kwargs)
        events = [] if cancelled else [event async for event in asked]
        answer, ids = _as_sampled(events)
        if answer is None or not (messages or system_prompt):  # chat templates cannot render an empty conversation
            for event in events:
                yield event
            return
        _next.set(answer)
        async for event in super().stream(self._with_sampled_ids(messages), tool_specs, system_prompt, **kwargs):
            start = event.get("contentBlockStart", {}).get("start", {})
            if "toolUse" in start:
                shown = ids.pop(0)
                self._sampled_ids.setdefault(shown, []).append(start["toolUse"]["toolUseId"])
                event = {"contentBlockStart": {"start": {"toolUse": {**start["toolUse"], "toolUseId": shown}}}}
            if "metadata" not in event:
                yield event
        for event in events:
            if "metadata" in event:
                yield event

    async def structured_output(self, *args, **kwargs):
        async for event in self.brain.structured_output(*args, **kwargs):
            yield event

    def _with_sampled_ids(self, messages):
        """Return messages with the sampled ids; calls with the same id are matched in order."""
        seen = Counter()

        def block(given):
            for kind in ("toolUse", "toolResult"):
                if isinstance(given, dict) and kind in given:
                    shown = given[kind]["toolUseId"]
                    seen[shown] += kind == "toolUse"
                    known = self._sampled_ids.get(shown, [shown])
                    return {kind: {**given[kind], "toolUseId": known[min(max(seen[shown], 1), len(known)) - 1]}}
            return given

        return [{**message, "content": [block(one) for one in message["content"]]} for message in messages]


def _as_sampled(events):
    """Return a stream as text in the Hermes format, and the ids of its calls; None if no text could produce it."""
    reasoning = None
    text, stop_reason, calls = "", "end_turn", []
    use = None
    for event in events:
        match event:
            case {"metadata": _} | {"messageStart": _}:
                pass
            case {"messageStop": stop}:
                stop_reason = stop.get("stopReason", "")
            case {"contentBlockStart": {"start": {"toolUse": dict(begun)}}}:
                use = {**begun, "input": ""}
                calls.append(use)
            case {"contentBlockStart": _}:
                use = None
            case {"contentBlockStop": _}:
                use = None
            case {"contentBlockDelta": {"delta": {"toolUse": delta, **rest}}} if use is not None and not rest:
                use["input"] += delta.get("input", "")
            case {"contentBlockDelta": {"delta": {"text": delta, **rest}}} if not (calls or rest):
                text += delta
            case {"contentBlockDelta": {"delta": {"reasoningContent": {"text": delta, **rest}}}} if not (
                text or calls or rest
            ):
                reasoning = (reasoning or "") + delta
            case _:
                return None, []
    if stop_reason not in _FINISH_REASONS or use is not None:
        return None, []
    text = text if reasoning is None else f"<think>{reasoning}</think>{text}"
    try:
        for use in calls:
            arguments = json.loads(use["input"] or "{}")
            if not (isinstance(arguments, dict) and use["name"] and use["toolUseId"]):
                return None, []
            call = json.dumps({"name": use["name"], "arguments": arguments})
            text += f"<tool_call>\n{call}\n</tool_call>"
    except (ValueError, KeyError, TypeError):
        return None, []
    answer = ScriptedAnswer(text, finish_reason=_FINISH_REASONS[stop_reason])
    return answer, [use["toolUseId"] for use in calls]


class CloudModel(SGLangModel):
    """A model that replaces a cloud provider's: it gives the scripted responses of the running test, then "Hello.".

    Attributes:
        answers: Remaining responses of the running test, for all its models.
    """

    answers = []

    def __init__(self, *args, max_tokens=None, **kwargs):
        server = ScriptedSGLang(
            build_chatml_tokenizer(), lambda request: self.answers.pop(0) if self.answers else "Hello."
        )
        limits = {} if max_tokens is None else {"max_new_tokens": max_tokens}
        super().__init__(tokenizer=build_chatml_tokenizer(), client=server.client(), sampling_params=limits)


_brains = {}


def brain_of(model):
    """Return the `SGLangModel` that wraps a test's model; return an `SGLangModel` of this plugin unchanged."""
    if isinstance(model, BrainModel | AuxiliaryModel):
        return model
    if id(model) not in _brains:
        _brains[id(model)] = model, BrainModel(model)
    return _brains[id(model)][1]


def pytest_addoption(parser):
    parser.addoption("--own-models", action="store_true", help="run with Strands' own models, for comparison")
    parser.addoption("--all-tests", action="store_true", help="run the tests of left_out.json too")


def pytest_configure(config):
    if config.getoption("own_models"):
        return
    if any(argument.startswith(CLOUD_TESTS) for argument in config.args):
        for module in (strands.agent.agent, strands.models, strands.models.bedrock):
            module.BedrockModel = CloudModel
        return
    stream_messages = event_loop.stream_messages

    def with_brain(model, *args, **kwargs):
        return stream_messages(brain_of(model), *args, **kwargs)

    event_loop.stream_messages = with_brain
    from tests.fixtures import mocked_model_provider  # Strands' own

    original = mocked_model_provider.MockedModelProvider

    class MockedModelProvider(BrainModel):
        """An `SGLangModel` whose responses come from Strands' scripted model."""

        def __init__(self, *args, **kwargs):
            super().__init__(original(*args, **kwargs))

        index = property(lambda self: self.brain.index, lambda self, index: setattr(self.brain, "index", index))

        def __getattr__(self, name):
            if name == "brain":
                raise AttributeError(name)
            return getattr(self.brain, name)

    mocked_model_provider.MockedModelProvider = MockedModelProvider


@pytest.fixture(autouse=True)
def _brains_of_a_test(request):
    CloudModel.answers[:] = ANSWERS.get(request.node.nodeid, [])
    yield
    _brains.clear()


def pytest_ignore_collect(collection_path, config):
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if path in LEFT_OUT and not config.getoption("all_tests") else None


def pytest_collection_modifyitems(config, items):
    if config.getoption("all_tests"):
        return
    left_out = [item for item in items if any(_is_of(item.nodeid, entry) for entry in LEFT_OUT)]
    stale = [
        entry
        for entry in LEFT_OUT
        if not (config.rootpath / entry.partition("::")[0]).exists()
        or ("::" in entry and config.args == [entry.partition("/")[0]])
        and not any(_is_of(item.nodeid, entry) for item in left_out)
    ]
    if stale and config.args in (["tests"], [CLOUD_TESTS]):
        raise pytest.UsageError(f"entries of left_out.json that match no test: {stale}")
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_of(nodeid, entry):
    return nodeid == entry or nodeid.startswith((f"{entry}[", f"{entry}::"))
