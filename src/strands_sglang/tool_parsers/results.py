"""The results of tool parsers.

Tool calls are parsed as the model wrote them; nothing is repaired or guessed. A call that does not parse becomes an
error: its name is one that no tool has, its input is empty, and it keeps the raw text and one sentence about what was
wrong. The model sees its mistake, and no tool runs.
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
"""Most calls that are read in one turn, since each is a task for the agent. The rest is one malformed call."""


class ToolCallStatus(str, Enum):
    """Status of a parsed tool call.

    Attributes:
        OK: The call is complete and well formed.
        MALFORMED: The call does not follow its format, or a value does not have the type that the tool declares.
        UNTERMINATED: The call begins but does not end.
        UNKNOWN_TOOL: The call is well formed, but names something that cannot be an agent's tool, such as a built-in
            of the model.
        NOT_AN_OBJECT: The arguments are JSON, but not an object of named arguments.
    """

    OK = "ok"
    MALFORMED = "malformed"
    UNTERMINATED = "unterminated"
    UNKNOWN_TOOL = "unknown_tool"
    NOT_AN_OBJECT = "not_an_object"


# Not the generator of the `random` module, which training code seeds alike in all processes.
_ids = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.seed)


def new_tool_call_id() -> str:
    """Return an id that is unique across processes."""
    return f"call_{_ids.getrandbits(128):032x}"


@dataclass(frozen=True, slots=True)
class ToolParseResult:
    """A tool call that a model made or tried to make.

    Attributes:
        id: Id of the call, globally unique: an agent confuses the results of two calls with one id.
        name: Tool to run. `UNKNOWN_NAME` for errors, so that no tool runs.
        input: Arguments of the call; empty for errors.
        raw: Text that did not parse, unchanged; None for a valid call.
        error: One sentence that explains the error to the model; None for a valid call.
        status: Status of the call. None derives it from `raw`.
        native_id: Id that the model wrote, in formats with call ids.
        attempted_name: Name of the tool that a failed call seems to have meant, if the text shows one.

    Raises:
        ValueError: `id` or `name` is empty, a value has the wrong type, or `status` and `raw` contradict each other.
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
        """Validate the fields and derive the status."""
        if not (isinstance(self.id, str) and self.id and isinstance(self.name, str) and self.name):
            raise ValueError(f"a tool call needs an id and a name, got id={self.id!r}, name={self.name!r}")
        if not isinstance(self.input, dict):
            raise ValueError(f"the input of a tool call must be a dict of arguments, not {self.input!r}")
        for name in ("raw", "error", "native_id", "attempted_name"):  # saved with the call
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"the {name} of a tool call must be a string or None, not {getattr(self, name)!r}")
        if self.status is None:
            object.__setattr__(self, "status", ToolCallStatus.MALFORMED if self.is_error else ToolCallStatus.OK)
        if (self.status is ToolCallStatus.OK) is (self.raw is not None):
            raise ValueError(f"status={self.status.value!r} contradicts raw={self.raw!r}: only errors have raw text")

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
        """Return an error result for a call that did not parse.

        Args:
            id: Id of the call.
            raw: Text that did not parse, unchanged.
            name: Name of the tool that the call seems to have meant; it becomes the `name` and the `attempted_name` of
                the result. None uses `UNKNOWN_NAME`, so that no tool runs.
            error: One sentence that explains the error to the model.
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
        """The arguments as JSON text for a valid call, the raw text for an error."""
        return json.dumps(self.input) if self.raw is None else self.raw


@dataclass(frozen=True)
class ParsedTurn:
    """A sampled turn, split into reasoning, text and tool calls.

    Attributes:
        reasoning: Text inside reasoning marks, including reasoning that the prompt opened or that nothing closed. None
            if there is only white space.
        text: Visible text, without reasoning and without the markup of tool calls. White space that only separated it
            from removed markup is removed too; all other text is unchanged.
        tool_calls: Calls in the order in which the model made them. After the first 1000, the rest of the turn is one
            malformed call.
        ends_in_reasoning: Whether the turn ends inside reasoning that nothing closed, even if that is empty.
        has_reasoning: Whether the turn holds reasoning, even if that is empty.
    """

    reasoning: str | None
    text: str
    tool_calls: tuple[ToolParseResult, ...]
    ends_in_reasoning: bool = False
    has_reasoning: bool = False


def failed_call(
    raw: str,
    error: str,
    status: ToolCallStatus = ToolCallStatus.MALFORMED,
    attempted_name: str | None = None,
    native_id: str | None = None,
) -> ToolParseResult:
    """Return an error result, which runs no tool."""
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
    """Return the error result for all calls of a turn after the first `MAX_CALLS`."""
    return failed_call(raw, f"a turn may contain at most {MAX_CALLS} calls")


class BrokenCallError(PortableError, ValueError):
    """A call does not follow its format.

    Attributes:
        position: Where the call breaks the format, as an index into the text. The call ends at the first end mark from
            there on, since everything before was read as part of it. If that mark was in a string of the call, an
            unmatched end mark follows.
        name: Tool that the call seems to mean, if the text shows one.
        native_id: Id that the model wrote for the call.
        cut: For calls that no mark ends and that take the rest of the turn: whether the end is missing, rather than
            wrong. None for all other calls.
        begin: Where the broken call begins. None means right after its start mark.
        before: Valid calls before this one.
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
        """Store the details with the message."""
        super().__init__(error)
        self.position = position
        self.name = name
        self.native_id = native_id
        self.cut = cut
        self.begin: int | None = None
        self.before: tuple[ToolParseResult, ...] = ()
