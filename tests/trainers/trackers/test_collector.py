"""What model calls report, as a collector receives it by OpenTelemetry's own exporters."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support.agents import build_chatml_tokenizer, call, make_agent

KINDS = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


@pytest.fixture
def collector():
    """A collector on a free port: its address, and what it has received by path."""
    received = {path: [] for path in KINDS}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received[self.path].append(KINDS[self.path].FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_receives_spans_and_metrics_of_calls(collector):
    url, received = collector
    spans = TracerProvider()
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
    trace.set_tracer_provider(spans)
    points = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/v1/metrics"))])
    metrics.set_meter_provider(points)
    tokenizer = build_chatml_tokenizer()
    server = ScriptedSGLang(tokenizer, [call("multiply", a=25, b=17), "It is 425."], weight_version="7")
    model = SGLangModel(tokenizer=tokenizer, client=server.client())
    make_agent(model)("What is 25 * 17?")
    assert spans.force_flush() and points.force_flush()
    spans.shutdown()
    points.shutdown()
    told = [
        {one.key: one.value for one in span.attributes}
        for request in received["/v1/traces"]
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    calls = [one for one in told if "sglang.turn.index" in one]
    assert [one["sglang.turn.index"].int_value for one in calls] == [0, 1]
    assert calls[1]["sglang.cached_tokens"].int_value > 0 and calls[1]["sglang.weight_version"].string_value == "7"
    assert calls[1]["sglang.turn.reason"].string_value == model.trajectory.turns[1].reason
    counted = {
        (metric.name, point.attributes[0].value.string_value): point.as_int
        for request in received["/v1/metrics"][:1]
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "sglang.tokens"
        for point in metric.sum.data_points
    }
    sampled = sum(len(turn.output_ids) for turn in model.trajectory.turns)
    assert counted["sglang.tokens", "sampled"] == sampled
