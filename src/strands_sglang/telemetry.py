"""What model calls report to OpenTelemetry: attributes on the span of the caller, and metrics.

Strands starts a span for each model call, and the call runs in it. Unless the program configures OpenTelemetry's SDK,
nothing is recorded, and a call spends about a microsecond in empty functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace

if TYPE_CHECKING:
    from .trajectory.turn import Turn

_meter = metrics.get_meter("strands_sglang")
_requests = _meter.create_histogram(
    "sglang.call.duration",
    unit="s",
    description="Seconds that the requests of a model call took, retries included",
    explicit_bucket_boundaries_advisory=[0.01 * 2**i for i in range(17)],  # the default ones are for milliseconds
)
_tokens = _meter.create_counter("sglang.tokens", unit="{token}", description="Tokens of model calls, by type")
_retries = _meter.create_counter("sglang.retries", unit="{retry}", description="Failed attempts that were repeated")


def report_turn(turn: Turn) -> None:
    """Report a model call that has ended, with or without an answer.

    Args:
        turn: The call.
    """
    generation, status = turn.generation, turn.status.value
    _requests.record(turn.requests_s, {"status": status})
    if generation is not None:
        for kind, count in (
            ("prompt", generation.prompt_tokens),
            ("cached", generation.cached_tokens),
            ("sampled", generation.completion_tokens),
        ):
            _tokens.add(count, {"type": kind})
    span = trace.get_current_span()
    if not span.is_recording():
        return
    facts: dict[str, Any] = {
        "sglang.turn.index": turn.index,
        "sglang.turn.parent": None if turn.parent is None else turn.parent.index,
        "sglang.turn.reason": turn.reason,
        "sglang.turn.status": status,
        "sglang.turn.new_prompt_tokens": len(turn.prompt_ids),
        "sglang.request_seconds": turn.requests_s,
    }
    if generation is not None:
        facts |= {
            "sglang.prompt_tokens": generation.prompt_tokens,
            "sglang.cached_tokens": generation.cached_tokens,
            "sglang.sampled_tokens": generation.completion_tokens,
            "sglang.finish_type": generation.finish_type,
            "sglang.weight_version": generation.weight_version,
            "sglang.server_seconds": generation.latency_s,
            "sglang.queue_seconds": generation.meta_info.get("queue_time"),
        }
    if turn.cause is not None:
        facts["sglang.error"] = turn.failure
    span.set_attributes({name: value for name, value in facts.items() if value is not None})


def report_retry(server: str, kind: str, retries: int) -> None:
    """Report that a failed attempt of a request is repeated.

    Args:
        server: Address of the server that failed.
        kind: How the attempt failed.
        retries: Number of retries of the request so far.
    """
    _retries.add(1, {"kind": kind})
    span = trace.get_current_span()
    if span.is_recording():
        span.add_event("sglang.retry", {"sglang.server": server, "sglang.failure": kind})
        span.set_attribute("sglang.retries", retries)
