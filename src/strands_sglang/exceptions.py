"""Errors between this library and an SGLang server.

They share the base class `SGLangClientError`, so that one `except` separates failed infrastructure from errors in the
agent's own code. Every message says what was wrong, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class PortableError(Exception):
    """Error that can be pickled, whatever arguments its constructor takes.

    By default, unpickling calls the constructor with the message alone. A constructor that requires more then kills a
    worker pool.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Restore the arguments and attributes instead of calling the constructor."""
        return _restore_error, (type(self), self.args, self.__dict__)


def _restore_error(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class SGLangClientError(PortableError):
    """A request to an SGLang server returned no usable response.

    Base class of all errors of the server, the network and the client's limits. From the second model call of an agent
    on, Strands wraps exceptions in `EventLoopException`;
    [`termination_reason`][strands_sglang.termination_reason] looks inside.
    """


class SGLangHTTPError(SGLangClientError):
    """The server returned an HTTP error, or a redirect, which the client does not follow.

    Attributes:
        status: HTTP status code.
        body: Response body as text, cut after 4,096 characters.
    """

    def __init__(self, message: str, *, status: int, body: str = "") -> None:
        """Initialize with the message, status and body."""
        super().__init__(message)
        self.status = status
        self.body = body


class SGLangContextLengthError(SGLangHTTPError):
    """The prompt, or the prompt plus `max_new_tokens`, exceeds the model's context."""


class SGLangThrottledError(SGLangHTTPError):
    """The server is still too busy (429, 503) after all retries."""


class SGLangConnectionError(SGLangClientError):
    """The server was unreachable, dropped the connection, or did not respond within `timeout`."""


class SGLangDecodingError(SGLangClientError):
    """The server returned status 200 with a body that is not a valid response."""


class _EndedEarlyError(SGLangClientError):
    """A generation ended early; carries the tokens sampled so far."""

    def __init__(self, message: str, *, response: dict[str, Any] | None = None) -> None:
        """Initialize with the message and the partial response."""
        super().__init__(message)
        self.response = response


class SGLangAbortedError(_EndedEarlyError):
    """The server aborted the generation: a weight update, a pause, or `/abort_request`.

    Raised with `on_abort="raise"`. The tokens sampled so far are recorded as a turn with the status `cut`.

    Attributes:
        response: The server's response with the tokens sampled so far.
    """


class SGLangDeadlineError(_EndedEarlyError):
    """The `deadline` for a whole call has passed, including its retries.

    The outcome of the episode is `timeout` if a server was working on the request, else `infrastructure_error`.

    Attributes:
        response: The server's response with the tokens sampled so far; None if no server was working on the request, or
            if its response did not arrive within `abort_grace` seconds.
    """


class SGLangCancelledError(_EndedEarlyError):
    """The caller's cancel signal ended the call, as `agent.cancel()` does.

    Attributes:
        response: The server's response with the tokens sampled so far; None if there is none.
    """


class TokenizerMismatchError(SGLangClientError, ValueError):
    """The model object's tokenizer is not the one of the served model, or of the trajectory that it should extend.

    Raised before the first request, and nothing is recorded. Load the tokenizer from the `tokenizer_path` that the
    server's `/model_info` reports.
    """


class JournalError(Exception):
    """The journal of an episode cannot be written, read or continued; says which, and why."""


class EpisodeInterruptedError(Exception):
    """An episode cannot continue: its process died inside a tool call that must not run twice."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, outermost first, through Strands' wrapper and exception groups.

    An exception raised while another was handled, but not from it, is a separate error.
    """
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        nested = [getattr(current, "original_exception", None), current.__cause__, *getattr(current, "exceptions", ())]
        waiting += [cause for cause in nested if isinstance(cause, BaseException)]
