"""What a tool parser returns.

Tool calls are parsed as they were generated: nothing is repaired and nothing is guessed. What does not parse becomes a
result that is an error: it has a name that no tool has, empty input, the text that was written and a sentence about
what was wrong with it, so that the model gets to see its mistake and nothing runs.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from ..exceptions import PortableError

MAX_CALLS = 1000
"""Calls of one turn that are read; each is a task for the agent. From the next one on, all is one malformed call."""


class ToolCallStatus(str, Enum):
    """How a tool call came out of the parser.

    Attributes:
        OK: The call is complete and well formed.
        MALFORMED: The call does not follow its format, or a value is not of the type that the tool declares.
        UNTERMINATED: The call begins but its end never comes.
        UNKNOWN_TOOL: The call is well formed, and goes to something that no agent's tool can be, such as a built-in of
            the model.
        NOT_AN_OBJECT: The arguments are JSON, but not an object of named arguments.
    """

    OK = "ok"
    MALFORMED = "malformed"
    UNTERMINATED = "unterminated"
    UNKNOWN_TOOL = "unknown_tool"
    NOT_AN_OBJECT = "not_an_object"


# Apart from the `random` module's own generator, which training code seeds alike in all its processes.
_ids = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.seed)


def new_tool_call_id() -> str:
    """Return an id that no other tool call has, in this process or another one."""
    return f"call_{_ids.getrandbits(128):032x}"


@dataclass(frozen=True, slots=True)
class ToolParseResult:
    """One tool call that a model made, or tried to make.

    Attributes:
        id: Globally unique; agents run two calls of one id both, and confuse their results.
        name: The tool to run; `UNKNOWN_NAME` for errors, so that nothing can run.
        input: The arguments; empty for errors.
        raw: Exactly what did not parse; None for a good call.
        error: One sentence for the model about what was wrong; None for a good call.
        status: What kind of result this is; from `raw` if left out.
        native_id: The id that the model itself wrote, in formats that have one.
        attempted_name: For errors, the name that the model seems to have called, as far as it can be told.
    """

    UNKNOWN_NAME: ClassVar[str] = "unknown_tool"

    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    error: str | None = None
    status: ToolCallStatus = None  # type: ignore[assignment]  # set below, from `raw`
    native_id: str | None = None
    attempted_name: str | None = None

    def __post_init__(self) -> None:
        """Derive the status.

        Raises:
            ValueError: There is no id or name, the input is no dict, another value is no string, or `status` and `raw`
                contradict each other.
        """
        if not (isinstance(self.id, str) and self.id and isinstance(self.name, str) and self.name):
            raise ValueError(f"a tool call needs an id and a name, but has id={self.id!r}, name={self.name!r}")
        if not isinstance(self.input, dict):
            raise ValueError(f"the input of a tool call is a dict of arguments, not {self.input!r}")
        for name in ("raw", "error", "native_id", "attempted_name"):  # they are saved with the call
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"the {name} of a tool call is a string or None, not {getattr(self, name)!r}")
        if self.status is None:
            object.__setattr__(self, "status", ToolCallStatus.MALFORMED if self.is_error else ToolCallStatus.OK)
        if (self.status is ToolCallStatus.OK) is (self.raw is not None):
            raise ValueError(f"status={self.status.value!r} contradicts raw={self.raw!r}: errors have raw text")

    @classmethod
    def from_parse_error(
        cls,
        id: str,
        raw: str,
        name: str | None = None,
        *,
        error: str | None = None,
        status: ToolCallStatus = ToolCallStatus.MALFORMED,
    ) -> ToolParseResult:
        """Return the result for a call that did not parse.

        Args:
            id: Id of the call.
            raw: Exactly what did not parse.
            name: Name that the result has; `UNKNOWN_NAME` if left out, which is what keeps tools from running.
            error: One sentence about what was wrong.
            status: Any status but `OK`.
        """
        return cls(
            id=id, name=name or cls.UNKNOWN_NAME, raw=raw, error=error, status=status, attempted_name=name or None
        )

    @property
    def is_error(self) -> bool:
        """Whether the call did not parse."""
        return self.raw is not None

    @property
    def payload(self) -> str:
        """The arguments as JSON text for a good call, what the model wrote for an error."""
        return json.dumps(self.input) if self.raw is None else self.raw


@dataclass(frozen=True)
class ParsedTurn:
    """One sampled turn, taken apart.

    Attributes:
        reasoning: The text inside reasoning marks, also if the prompt opened it or nothing closed it; None if there was
            none but white space.
        text: What a user sees: no reasoning, no markup of tool calls. White space that only separated it from removed
            markup is gone, everything else is untouched.
        tool_calls: The calls in the order in which they were made. All that is behind the first `MAX_CALLS` is one
            malformed call.
        ends_in_reasoning: The turn ends inside reasoning that nothing closed, be it empty.
    """

    reasoning: str | None
    text: str
    tool_calls: tuple[ToolParseResult, ...]
    ends_in_reasoning: bool = False


def failed_call(
    raw: str,
    error: str,
    status: ToolCallStatus = ToolCallStatus.MALFORMED,
    attempted_name: str | None = None,
    native_id: str | None = None,
) -> ToolParseResult:
    """Return the result for a call that must not run."""
    return ToolParseResult(
        new_tool_call_id(),
        ToolParseResult.UNKNOWN_NAME,
        raw=raw,
        error=error,
        status=status,
        native_id=native_id,
        attempted_name=attempted_name,
    )


def too_many_calls(raw: str) -> ToolParseResult:
    """Return the one result for all calls of a turn after the first `MAX_CALLS`."""
    return failed_call(raw, f"a turn may hold {MAX_CALLS} calls, and this one holds more")


class BrokenCallError(PortableError, ValueError):
    """A call stops following its format.

    Attributes:
        position: Where, as an index into the text. The call goes up to the first end mark from there on: whatever is
            before was read as part of it. If that mark stood in a string of the call, another one follows that closes
            nothing.
        name: The tool that it seems to call, as far as it can be told.
        native_id: The id that the model wrote for it.
        cut: For calls that no mark ends, which take the rest of the turn: whether something is missing at the end,
            rather than wrong. None for all others.
        begin: Where the broken call begins; None for right after its start mark.
        before: The calls before it, which stand.
    """

    def __init__(
        self,
        position: int,
        error: str,
        name: str | None = None,
        native_id: str | None = None,
        *,
        cut: bool | None = None,
    ) -> None:
        """Keep what is known of the call beside the message."""
        super().__init__(error)
        self.position = position
        self.name = name
        self.native_id = native_id
        self.cut = cut
        self.begin: int | None = None
        self.before: tuple[ToolParseResult, ...] = ()
