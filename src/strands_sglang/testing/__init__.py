"""A scripted SGLang server for tests of agents and environments: real tokens and response formats, no model.

    server = ScriptedSGLang(tokenizer, ["The answer is 4.", ScriptedAnswer("cut", finish_reason="length")])
    model = SGLangModel(tokenizer=tokenizer, client=server.client())

    with server.serve() as base_url:  # the same server on a port, for other processes
        ...

Responses have the format of SGLang 0.5.23; a contract test sends the same requests to a real server and compares them.
"""

from __future__ import annotations

from .sampling import (
    Answer,
    AnswerFunction,
    ScriptedAnswer,
    ScriptedExperts,
    ScriptedFault,
    ScriptedRefusal,
    ScriptedRequest,
    ScriptedResponse,
    scripted_logprob,
)
from .server import ScriptedSGLang, ServedOnPort

__all__ = [
    "Answer",
    "AnswerFunction",
    "ScriptedAnswer",
    "ScriptedExperts",
    "ScriptedFault",
    "ScriptedRefusal",
    "ScriptedRequest",
    "ScriptedResponse",
    "ScriptedSGLang",
    "ServedOnPort",
    "scripted_logprob",
]
