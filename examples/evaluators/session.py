"""`SessionReward`: evaluators of traces of strands-agents-evals, such as helpfulness, goal success and tool choice.

SessionReward(HelpfulnessEvaluator(model=judge))
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from strands_evals.extractors.tools_use_extractor import extract_agent_tools_used
from strands_evals.types.trace import (
    AgentInvocationSpan,
    Session,
    SpanInfo,
    ToolCall,
    ToolExecutionSpan,
    ToolResult,
    Trace,
)

from strands_env.rewards import EvaluatorReward


class SessionReward(EvaluatorReward):
    """An `EvaluatorReward` whose evaluator reads a `Session`."""

    def trajectory_of(self, messages: list[Any]) -> Session:
        """Return the messages as a session."""
        return session_of(messages)


def session_of(messages: list[Any]) -> Session:
    """Convert messages to a session: one trace for each message of the user, without times and tool descriptions."""
    now = datetime.now(timezone.utc)
    info = SpanInfo(session_id="episode", start_time=now, end_time=now)
    texts = ["\n".join(block["text"] for block in message["content"] if "text" in block) for message in messages]
    starts = [at for at, text in enumerate(texts) if text and messages[at]["role"] == "user"]
    session = Session(session_id="episode", traces=[])
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        trace = Trace(session_id="episode", trace_id=str(len(session.traces)), spans=[])
        trace.spans.append(
            AgentInvocationSpan(
                span_info=info, user_prompt=texts[start], agent_response=texts[end - 1], available_tools=[]
            )
        )
        for used in extract_agent_tools_used(messages[start:end]):
            error = used["tool_result"] if used["is_error"] else None
            trace.spans.append(
                ToolExecutionSpan(
                    span_info=info,
                    tool_call=ToolCall(name=used["name"], arguments=used["input"]),
                    tool_result=ToolResult(content=used["tool_result"] or "", error=error),
                )
            )
        session.traces.append(trace)
    return session
