"""What model calls report to OpenTelemetry, seen through its SDK."""

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from strands import Agent
from strands.telemetry.tracer import get_tracer

from strands_sglang import SGLangClientError, SGLangModel
from strands_sglang.testing import ScriptedAnswer, ScriptedResponse, ScriptedSGLang
from support.agents import call, make_agent


@pytest.fixture(scope="module")
def sdk():
    """The SDK, configured for this process; it cannot be configured twice."""
    spans, points = InMemorySpanExporter(), InMemoryMetricReader()
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(spans))
    else:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([points]))
    return spans, points


@pytest.fixture
def seen(sdk, monkeypatch):
    """Functions that return the spans of model calls, and the metrics, since the test began."""
    spans, points = sdk
    spans.clear()
    tracer = get_tracer()
    monkeypatch.setattr(tracer, "tracer_provider", trace.get_tracer_provider())
    monkeypatch.setattr(tracer, "tracer", trace.get_tracer("strands"))

    def of_calls():
        return [span for span in spans.get_finished_spans() if "sglang.turn.index" in span.attributes]

    def of_metrics():
        data = points.get_metrics_data()
        found = [
            one
            for scope in (data.resource_metrics if data else ())
            for part in scope.scope_metrics
            for one in part.metrics
        ]
        return {
            (one.name, *(str(value) for value in point.attributes.values())): getattr(point, "value", None)
            or point.count
            for one in found
            for point in one.data.data_points
        }

    return of_calls, of_metrics


def test_the_spans_of_strands_have_the_facts_of_their_calls(chatml_tokenizer, seen):
    of_calls, of_metrics = seen
    before = of_metrics()
    answers = [call("multiply", a=25, b=17), "It is 425."]
    server = ScriptedSGLang(chatml_tokenizer, answers, weight_version="7")
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    make_agent(model)("What is 25 * 17?")
    first, second = of_calls()
    opened, extended = model.trajectory.turns
    assert first.attributes["sglang.turn.reason"] == opened.reason and "sglang.turn.parent" not in first.attributes
    facts = dict(second.attributes)
    assert (facts["sglang.turn.parent"], facts["sglang.turn.status"]) == (0, "answered")
    assert facts["sglang.prompt_tokens"] == extended.generation.prompt_tokens
    assert facts["sglang.cached_tokens"] == extended.generation.cached_tokens > 0
    assert facts["sglang.sampled_tokens"] == len(extended.output_ids)
    assert facts["sglang.turn.new_prompt_tokens"] == len(extended.prompt_ids)
    assert (facts["sglang.weight_version"], facts["sglang.finish_type"]) == ("7", "stop")
    assert facts["sglang.request_seconds"] >= 0 and "sglang.retries" not in facts
    after = of_metrics()
    sampled = sum(len(turn.output_ids) for turn in model.trajectory.turns)
    key = ("sglang.tokens", "sampled")
    assert after[key] - before.get(key, 0) == sampled
    key = ("sglang.call.duration", "answered")
    assert after[key] - before.get(key, 0) == 2


def test_a_retry_is_an_event_of_the_span(chatml_tokenizer, seen):
    of_calls, of_metrics = seen
    server = ScriptedSGLang(chatml_tokenizer, [ScriptedResponse(503, b"busy"), ScriptedAnswer("4")])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client(max_retries=2, retry_delay=0.001))
    Agent(model=model, callback_handler=None)("2 + 2?")
    (span,) = of_calls()
    (event,) = [event for event in span.events if event.name == "sglang.retry"]
    assert event.attributes["sglang.failure"] == "refused" and span.attributes["sglang.retries"] == 1
    assert of_metrics()[("sglang.retries", "refused")] >= 1


def test_a_call_that_fails_is_reported_with_its_error(chatml_tokenizer, seen):
    of_calls, _ = seen
    server = ScriptedSGLang(chatml_tokenizer, [ScriptedResponse(500, b"broken")])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client(max_retries=0))
    with pytest.raises(Exception) as raised:
        Agent(model=model, callback_handler=None)("2 + 2?")
    assert isinstance(raised.value, SGLangClientError) or raised.value.__cause__ is not None
    (span,) = of_calls()
    assert span.attributes["sglang.turn.status"] == "failed" and "500" in span.attributes["sglang.error"]


def test_durations_of_seconds_fall_into_different_buckets(chatml_tokenizer, sdk):
    _, points = sdk
    server = ScriptedSGLang(chatml_tokenizer, ["4"])
    make_agent(SGLangModel(tokenizer=chatml_tokenizer, client=server.client()))("2 + 2?")
    metric = {
        one.name: one
        for resource in points.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for one in scope.metrics
    }["sglang.call.duration"]
    bounds = metric.data.data_points[0].explicit_bounds
    assert sum(0.1 < bound < 5 for bound in bounds) >= 5 and bounds[-1] > 600
