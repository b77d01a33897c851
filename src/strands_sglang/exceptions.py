"""Everything that can go wrong between this library and an SGLang server.

One family, so that a caller can tell "the infrastructure failed" (`SGLangClientError`) from an error of the agent's own
code with one `except`. Every message says what was wrong, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class PortableError(Exception):
    """An error that crosses processes whatever its constructor takes.

    By default, unpickling calls the constructor with the message alone, and one that wants more kills a worker pool.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Restore the arguments and attributes instead of calling the constructor."""
        return _restore_error, (type(self), self.args, self.__dict__)


def _restore_error(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class SGLangClientError(PortableError):
    """A request to an SGLang server did not give a usable answer."""


class SGLangHTTPError(SGLangClientError):
    """The server answered with an HTTP status that is no success (a redirect counts: nothing follows it).

    Attributes:
        status: HTTP status code.
        body: The response body as text, at most a few kilobytes of it.
    """

    def __init__(self, message: str, *, status: int, body: str = "") -> None:
        """Keep the status and the body beside the message."""
        super().__init__(message)
        self.status = status
        self.body = body


class SGLangContextLengthError(SGLangHTTPError):
    """The prompt, or the prompt plus `max_new_tokens`, is longer than the model's context."""


class SGLangThrottledError(SGLangHTTPError):
    """The server is too busy at present (429, 503), also after all retries."""


class SGLangConnectionError(SGLangClientError):
    """The server could not be reached, dropped the connection, or did not answer in time."""


class SGLangDecodingError(SGLangClientError):
    """The server answered 200 with something that is not a `/generate` response."""


class _EndedEarlyError(SGLangClientError):
    """A generation that was ended from outside; has what was sampled until then."""

    def __init__(self, message: str, *, response: dict[str, Any] | None = None) -> None:
        """Keep the partial response beside the message."""
        super().__init__(message)
        self.response = response


class SGLangAbortedError(_EndedEarlyError):
    """The server aborted the generation (weight update, pause, `/abort_request`).

    Attributes:
        response: The server's response with the tokens that it had sampled until then.
    """


class SGLangDeadlineError(_EndedEarlyError):
    """The client's `deadline` for a whole call has passed.

    Attributes:
        response: The server's response with the tokens that it had sampled until then; None if no server was working on
            the request, or none told in time.
    """


class SGLangCancelledError(_EndedEarlyError):
    """The caller's cancel signal ended the call.

    Attributes:
        response: The server's response with the tokens that it had sampled until then; None if there is none.
    """


class TokenizerMismatchError(SGLangClientError):
    """The tokenizer given to the model is not the tokenizer of the served model."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, then what it was raised from, outermost first; through Strands' wrapper and exception groups.

    An exception that was raised while another one was handled, but not from it, is an error of its own.
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
