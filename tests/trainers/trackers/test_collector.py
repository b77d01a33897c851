"""What an evaluation reports to OpenTelemetry, as a real collector receives it: Rotel, over OTLP.

The collector runs in its own process and logs what arrives as text.
"""

import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import orjson
import pytest
import rotel
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from strands.hooks import BeforeModelCallEvent, HookProvider

from strands_env.core.models import sglang_model_factory
from strands_env.eval import Evaluator
from strands_sglang import SGLangClient, Trajectory
from strands_sglang.local.server import free_port
from strands_sglang.testing import ScriptedSGLang
from support.agents import build_chatml_tokenizer
from support.environments import ANSWER, ASK, CALL, CalculatorEnv, Contains

PROGRAM = Path(rotel.__file__).parent / "rotel-agent"
FIELD = re.compile(r"^ *-> (.+?): (?:Str|Int|Double)\((.*)\)$", re.MULTILINE)
POINT = re.compile(r"^     -> type: Str\((\w+)\)$.*?^Value: (\d+)$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def collector(tmp_path):
    """Rotel on a free port: its address, and a function that ends it and returns what it told."""
    log = tmp_path / "told.txt"
    grpc, http = free_port("127.0.0.1"), free_port("127.0.0.1")
    places = ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"]
    tells = ["--debug-log", "traces", "--debug-log", "metrics", "--debug-log-verbosity", "detailed"]
    with open(log, "wb") as output:
        command = [PROGRAM, "start", *places, *tells, "--exporter", "blackhole", "--pid-file", tmp_path / "pid"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", http)) == 0:
                    break
            time.sleep(0.01)
        else:
            pytest.fail(f"the collector did not start: {log.read_text()}")

        def end():
            process.send_signal(signal.SIGTERM)  # it handles what it has first
            assert process.wait(60) == 0
            return log.read_text()

        yield f"http://127.0.0.1:{http}", end
    finally:
        process.kill()
        process.wait()


class Metered(httpx.AsyncBaseTransport):
    """Answers as a server with `--enable-metrics`, which says how long a request waited; refuses the second one."""

    def __init__(self, server):
        self.server, self.requests = server.transport(), 0

    async def handle_async_request(self, request):
        response = await self.server.handle_async_request(request)
        if request.url.path != "/generate":
            return response
        self.requests += 1
        if self.requests == 2:
            return httpx.Response(503, content=b"busy", request=request)
        body = orjson.loads(await response.aread())
        body["meta_info"]["queue_time"] = 0.25
        return httpx.Response(200, content=orjson.dumps(body), request=request)


class Edits(HookProvider):
    """Shortens the first tool result before the third model call, which has to fork then."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(BeforeModelCallEvent, self.edit)

    def edit(self, event):
        if len(event.agent.messages) == 5:
            event.agent.messages[2]["content"][0]["toolResult"]["content"] = [{"text": "..."}]


async def test_a_collector_receives_what_an_evaluation_reports(collector, tmp_path):
    url, ended = collector
    spans, points = TracerProvider(), PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/v1/metrics"))
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
    trace.set_tracer_provider(spans)
    metrics.set_meter_provider(meter := MeterProvider([points]))
    tokenizer = build_chatml_tokenizer()
    server = ScriptedSGLang(tokenizer, [CALL, CALL, CALL, ANSWER], weight_version="7")  # the second one is refused
    client = SGLangClient("http://scripted", transport=Metered(server), max_retries=2, retry_delay=0.001)
    models = sglang_model_factory(tokenizer=tokenizer, client=client)

    async def factory(action):
        return CalculatorEnv(model_factory=models, reward_fn=Contains(), hooks=[Edits()])

    results = await Evaluator(factory, output_path=tmp_path, keep_trajectories=True).run([ASK])
    assert [sample.reward for sample in results["product"]] == [1.0]
    spans.shutdown()
    meter.shutdown()
    told = ended()
    (file,) = (tmp_path / "results.trajectories").iterdir()
    turns = Trajectory.load(file).turns
    told_spans = [dict(FIELD.findall(span)) for span in re.split(r"^Span #\d+$", told, flags=re.MULTILINE)]
    calls = [span for span in told_spans if "sglang.turn.index" in span]
    assert [call["sglang.turn.index"] for call in calls] == ["0", "1", "2"]
    for call, turn in zip(calls, turns, strict=True):
        answer = turn.generation
        assert call["sglang.turn.reason"] == turn.reason
        assert call["sglang.prompt_tokens"] == str(answer.prompt_tokens)
        assert call["sglang.cached_tokens"] == str(answer.cached_tokens)
        assert call["sglang.sampled_tokens"] == str(answer.completion_tokens)
        assert (call["sglang.weight_version"], call["sglang.queue_seconds"]) == ("7", "0.25")
    assert [call.get("sglang.retries") for call in calls] == [None, "1", None]
    assert "forks" in calls[2]["sglang.turn.reason"] and calls[2]["sglang.turn.parent"] == "0"
    counted = dict(POINT.findall(told[told.index("-> Name: sglang.tokens") :]))
    assert counted == {
        "prompt": str(sum(turn.generation.prompt_tokens for turn in turns)),
        "cached": str(sum(turn.generation.cached_tokens for turn in turns)),
        "sampled": str(sum(turn.generation.completion_tokens for turn in turns)),
    }
    assert int(counted["cached"]) > 0
    for name, label, count in (("call.duration", "status: Str(answered)", 3), ("retries", "kind: Str(refused)", 1)):
        metric = told[told.index(f"-> Name: sglang.{name}") :]
        assert re.search(rf"-> {re.escape(label)}$.*?^(?:Count|Value): {count}$", metric, re.MULTILINE | re.DOTALL)
