"""What is known and proven about a model before you train it: the report of `strands-sglang check`.

The report comes from the objects that a rollout uses: the family, the tool parser, the tokens that end a turn, the
self-check of the chat template, and a small conversation as tokens. With a server, it compares the vocabulary and
samples one round trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from strands.event_loop.streaming import process_stream
from strands.types.content import Messages
from strands.types.exceptions import ContextWindowOverflowException

from .client.client import SGLangClient
from .exceptions import SGLangClientError
from .model.model import DEFAULT_TOOL_PARSER, SGLangModel
from .model.server_check import check_server
from .shown import counted, first_difference
from .templates.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    SampledTurn,
    UnprovenContinuationError,
    get_chat_template,
)
from .terminal import fact_lines, paint, token_lines, width
from .tool_parsers import get_tool_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_QUESTION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is the weather in Oslo?"},
]
_ROUND_TRIP_TOKENS = 32


@dataclass(frozen=True)
class Piece:
    """A part of the example conversation.

    Attributes:
        kind: "opening", "sampled" or "continuation".
        tokens: The text of each token.
    """

    kind: str
    tokens: list[str]


@dataclass(frozen=True)
class RoundTrip:
    """Two turns sampled on a server.

    Attributes:
        base_url: Address of the server.
        error: Why the round trip failed; None on success.
        tokenizer_proven: Whether the server's tokenizer is known to be the model's. A router may not provide it.
        context_length: Context length in tokens; None if the server does not report it.
        sampled_tokens: Tokens of both sampled turns together.
        sequences: Sequences that they make: 1 if the second call extends the first.
        reason: Why the second call extends or forks.
        forks_inside: Whether the second call leaves out the stop token of the first, where the template writes another.
    """

    base_url: str
    error: str | None = None
    tokenizer_proven: bool = False
    context_length: int | None = None
    sampled_tokens: int = 0
    sequences: int = 0
    reason: str = ""
    forks_inside: bool = False

    @property
    def is_proven(self) -> bool:
        """Whether the tokenizer is the served one, and the second call continued the tokens of the first."""
        continues = self.sequences == 1 or self.forks_inside
        return self.error is None and self.tokenizer_proven and continues


@dataclass(frozen=True)
class ModelCheck:
    """The report.

    Attributes:
        model: Path or name of the model.
        family: Name of the model family; None if it is unknown.
        tool_parser: Name of the tool-call format.
        stops: Tokens that can end a turn.
        opens_reasoning: Whether the generation prompt opens reasoning.
        closes_reasoning: Text that closes reasoning that was cut off; None if it is unknown.
        rewrites_history: Whether the template renders earlier turns differently after a user message.
        shows_tools: Whether the template shows the model its tools.
        unproven: For each case, why it is not proven with a system prompt and tools; None if it is proven.
        unproven_when_plain: The same without a system prompt and tools.
        example: A small conversation as tokens.
        server: The round trip on a server; None if no server was named.
    """

    model: str
    family: str | None
    tool_parser: str
    stops: tuple[str, ...]
    opens_reasoning: bool
    closes_reasoning: str | None
    rewrites_history: bool
    shows_tools: bool
    unproven: dict[str, str | None]
    unproven_when_plain: dict[str, str | None]
    example: list[Piece]
    server: RoundTrip | None = None

    @property
    def is_proven(self) -> bool:
        """Whether everything is proven, on the server too if one was named, and the model sees its tools."""
        is_proven = self.shows_tools and not any(self.unproven.values())
        return is_proven and (self.server is None or self.server.is_proven)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-like data."""
        return {**asdict(self), "is_proven": self.is_proven}


async def check_model(
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    *,
    server: str | None = None,
    headers: Mapping[str, str] | None = None,
    chat_template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    family: str | None = None,
) -> ModelCheck:
    """Check a model's tokenizer and chat template, and a server if one is named.

    Args:
        tokenizer: The model's tokenizer.
        model: Path or name of the model, for the report.
        server: Address of a server.
        headers: Headers of its requests, as of `SGLangClient`.
        chat_template: Jinja text that replaces the tokenizer's template.
        template_arguments: Arguments for the chat template.
        family: Name of the model family, if the template does not show it.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or the template cannot render a plain exchange.
        ValueError: There is no such family.
    """
    template = get_chat_template(tokenizer, chat_template, template_arguments or {}, family)
    name = (template.family.tool_parser if template.family is not None else None) or DEFAULT_TOOL_PARSER
    # A call with such a part is an error, whatever follows it.
    cases = {"system prompt": "system prompt", "tool results": "tool result"}
    dropped = {cases[part]: f"the chat template drops the {part}" for part in sorted(template.left_out & cases.keys())}
    return ModelCheck(
        model=model,
        family=template.family.name if template.family is not None else None,
        tool_parser=name,
        stops=template.stops,
        opens_reasoning=template.opening(_QUESTION[1:], None).ends_with(get_tool_parser(name).think_start_token),
        closes_reasoning=template.reasoning_close,
        rewrites_history=template.rewrites_history(),
        shows_tools=template.shows_tools,
        unproven={**template.self_check(), **dropped},
        unproven_when_plain={**template.self_check(has_system=False, has_tools=False), **dropped},
        example=_example(template),
        server=None
        if server is None
        else await _ask(
            tokenizer,
            server,
            headers,
            chat_template=chat_template,
            chat_template_kwargs=dict(template_arguments or {}),
            family=family,
        ),
    )


def _example(template: ChatTemplate) -> list[Piece]:
    """A tool call and its result as tokens, or a plain exchange if the template takes no tool calls."""
    use_id = template.call_id("call00000", "weather", 0)
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": use_id, "function": function}],
    }
    result = {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": use_id}
    calls = [{"id": use_id, "name": "weather"}]
    with suppress(ChatTemplateError, UnprovenContinuationError):
        return _pieces(template, turn, [result], calls, [_TOOL])
    with suppress(ChatTemplateError, UnprovenContinuationError):
        answer = {"role": "assistant", "content": "Rain."}
        return _pieces(template, answer, [{"role": "user", "content": "And in Rome?"}], [], None)
    return []


def _pieces(
    template: ChatTemplate,
    turn: dict[str, Any],
    new: list[dict[str, Any]],
    calls: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> list[Piece]:
    opening = template.render(_QUESTION, tools, add_generation_prompt=True)
    whole = template.render([*_QUESTION, turn], tools, add_generation_prompt=False)
    # The part of the turn that the generation prompt contains may be missing from the history.
    common = first_difference(opening, whole)
    sampled = template.encode(whole[common:])
    ends = [i for i, token_id in enumerate(sampled) if token_id in template.stop_ids]
    sampled = sampled[: ends[0] + 1] if ends else sampled
    stop = sampled[-1] if ends else None
    follow = template.continuation(SampledTurn(sampled, stop, calls), new, tools)
    return [
        Piece(kind, [template.decode([token_id]) for token_id in ids])
        for kind, ids in (
            ("opening", template.encode(opening)),
            ("sampled", sampled),
            ("continuation", follow.token_ids),
        )
    ]


async def _ask(
    tokenizer: PreTrainedTokenizerBase, base_url: str, headers: Mapping[str, str] | None, **config: Any
) -> RoundTrip:
    async with SGLangClient(base_url, max_retries=0, headers=headers) as client:
        limit = {"max_new_tokens": _ROUND_TRIP_TOKENS}
        model = SGLangModel(tokenizer=tokenizer, client=client, sampling_params=limit, **config)
        try:
            facts = await check_server(client, model.chat_template)
            messages: Messages = [{"role": "user", "content": [{"text": "Say hello."}]}]
            for following in ("Say it again.", None):
                events = [event async for event in process_stream(model.stream(messages))]
                answer = events[-1]["stop"][1]
                messages.append(answer)
                if following is not None:
                    uses = [block["toolUse"]["toolUseId"] for block in answer["content"] if "toolUse" in block]
                    content: list[Any] = [{"text": "There are no tools."}]
                    results: list[Any] = [
                        {"toolResult": {"toolUseId": use_id, "status": "error", "content": content}} for use_id in uses
                    ]
                    messages.append({"role": "user", "content": [*results, {"text": following}]})
        except (SGLangClientError, ChatTemplateError, ContextWindowOverflowException) as error:
            return RoundTrip(client.base_url, error=str(error))
        turns = model.trajectory.turns
        return RoundTrip(
            base_url=client.base_url,
            tokenizer_proven=facts.tokenizer_proven,
            context_length=facts.context_length,
            sampled_tokens=sum(len(turn.output_ids) for turn in turns),
            sequences=len(model.trajectory.sequences()),
            reason=turns[-1].reason,
            forks_inside=turns[-1].parent_kept is not None,
        )


def report_lines(check: ModelCheck) -> Iterator[str]:
    """The report as text, line by line; colored if standard output is a terminal."""
    close = check.closes_reasoning
    opens = "opened by the generation prompt" if check.opens_reasoning else "not opened by the generation prompt"
    closes = "nothing is known to close it" if close is None else f"it is closed with {close!r}"
    rewritten = "earlier turns are rewritten after a user message (see history_policy)"
    hidden = "the chat template has no place for tools, so the model never calls one: pass --chat-template"
    facts: list[tuple[str, object]] = [
        ("model", check.model),
        ("family", check.family or "unknown: only what the chat template shows is used"),
        ("tool parser", check.tool_parser),
        ("ends of a turn", " ".join(check.stops) or "none"),
        ("reasoning", f"{opens}; if it is cut off, {closes}"),
        ("history", rewritten if check.rewrites_history else "kept"),
        ("tools", "shown to the model" if check.shows_tools else f"NOT SHOWN: {hidden}"),
    ]
    for line in fact_lines(facts, column=17):
        yield line.replace("NOT SHOWN", paint("NOT SHOWN", "red"), 1)
    yield ""
    for case, reason in check.unproven.items():
        if reason is None:
            yield f"{case:<22} {paint('proven', 'green')}"
            continue
        plain = " (proven without system prompt and tools)" if check.unproven_when_plain[case] is None else ""
        for line in fact_lines([(case, f"UNPROVEN{plain}: {reason}")], column=23):
            yield line.replace("UNPROVEN", paint("UNPROVEN", "red"), 1)
    for piece in check.example:
        yield ""
        yield paint(f"{piece.kind}, {counted(len(piece.tokens), 'token')}", "bold")
        color = "green" if piece.kind == "sampled" else None
        for line in token_lines([(repr(token)[1:-1], color) for token in piece.tokens], width() - 2):
            yield f"  {line}"
    if check.server is not None:
        yield ""
        yield from _server_lines(check.server)


def _server_lines(server: RoundTrip) -> Iterator[str]:
    yield from fact_lines([("server", server.base_url)], column=17)
    if server.error is not None:
        error = server.error.replace("base_url", "--server")  # the option that sets it
        for line in fact_lines([("FAILED", error)], column=17):
            yield line.replace("FAILED", paint("FAILED", "red"), 1)
        return
    sampled = counted(server.sampled_tokens, "token")
    yield from fact_lines(
        [
            ("tokenizer", "the served one" if server.tokenizer_proven else "UNPROVEN: the server has no /tokenize"),
            ("context", server.context_length or "not reported"),
            ("round trip", f"{sampled} sampled in two turns, {counted(server.sequences, 'sequence')}"),
            ("", f"the second call {server.reason}"),
        ],
        column=17,
    )
