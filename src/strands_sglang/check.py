"""What is known and proven of a model before it is trained: the report of `strands-sglang check`.

Everything in it comes from the objects that a rollout uses: the family, the tool parser, the tokens that end a turn,
the self-check of the chat template, and a small conversation as tokens. With a server, its vocabulary is compared and
one round trip is sampled.
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
from .templates.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    SampledTurn,
    UnprovenContinuationError,
    get_chat_template,
)
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
    """A stretch of the example conversation.

    Attributes:
        kind: "opening", "sampled" or "continuation".
        tokens: The text of each token.
    """

    kind: str
    tokens: list[str]


@dataclass(frozen=True)
class RoundTrip:
    """What came of asking a server.

    Attributes:
        base_url: Its address.
        error: Why it failed; None if it did not.
        tokenizer_proven: Whether the server's tokenizer was seen to be the model's (a router may not tell).
        context_length: In tokens; None if it does not tell.
        sampled_tokens: How many tokens the two sampled turns have together.
        sequences: How many sequences they make: 1 if the second call extended the first one.
        reason: Why the second call is where it is.
    """

    base_url: str
    error: str | None = None
    tokenizer_proven: bool = False
    context_length: int | None = None
    sampled_tokens: int = 0
    sequences: int = 0
    reason: str = ""

    @property
    def is_proven(self) -> bool:
        """Whether the tokenizer is the served one, and the second call went on from the first one's tokens."""
        goes_on = self.sequences == 1 or self.reason.startswith("forks inside")
        return self.error is None and self.tokenizer_proven and goes_on


@dataclass(frozen=True)
class ModelCheck:
    """The report.

    Attributes:
        model: Path or name of the model.
        family: Name of its family; None if it is not known.
        tool_parser: Name of the tool-call format.
        stops: The tokens that can end a turn.
        opens_reasoning: Whether the generation prompt opens reasoning.
        closes_reasoning: What is put behind reasoning that was cut off; None if that is not known.
        rewrites_history: Whether the template writes earlier turns anew behind a user message.
        unproven: By case, why it is not proven with a system prompt and tools; None where it is.
        unproven_when_plain: The same without either.
        example: A small conversation as tokens.
        server: What came of asking a server; None if none was named.
    """

    model: str
    family: str | None
    tool_parser: str
    stops: tuple[str, ...]
    opens_reasoning: bool
    closes_reasoning: str | None
    rewrites_history: bool
    unproven: dict[str, str | None]
    unproven_when_plain: dict[str, str | None]
    example: list[Piece]
    server: RoundTrip | None = None

    @property
    def is_proven(self) -> bool:
        """Whether everything is proven, and the server, if one was asked, agrees."""
        return not any(self.unproven.values()) and (self.server is None or self.server.is_proven)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-like data."""
        return {**asdict(self), "is_proven": self.is_proven}


async def check_model(
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    *,
    server: str | None = None,
    chat_template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    family: str | None = None,
) -> ModelCheck:
    """Look at a model's tokenizer and chat template, and at a server if one is named.

    Args:
        tokenizer: The model's tokenizer.
        model: Path or name of the model, for the report.
        server: Address of a server.
        chat_template: Jinja text that replaces the tokenizer's own template.
        template_arguments: Arguments for the chat template.
        family: Name of the model family, where the template does not tell it.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or it cannot render a plain exchange.
        ValueError: There is no such family.
    """
    template = get_chat_template(tokenizer, chat_template, template_arguments or {}, family)
    name = (template.family.tool_parser if template.family is not None else None) or DEFAULT_TOOL_PARSER
    return ModelCheck(
        model=model,
        family=template.family.name if template.family is not None else None,
        tool_parser=name,
        stops=template.stops,
        opens_reasoning=template.opening(_QUESTION[1:], None).ends_with(get_tool_parser(name).think_start_token),
        closes_reasoning=template.reasoning_close,
        rewrites_history=template.rewrites_history(),
        unproven=template.self_check(),
        unproven_when_plain=template.self_check(has_system=False, has_tools=False),
        example=_example(template),
        server=None
        if server is None
        else await _ask(
            tokenizer,
            server,
            chat_template=chat_template,
            chat_template_kwargs=dict(template_arguments or {}),
            family=family,
        ),
    )


def _example(template: ChatTemplate) -> list[Piece]:
    """A tool call and its result as tokens, or a plain exchange where the template takes no tool calls."""
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
    # What a generation prompt holds of the turn may be missing from history.
    common = next((i for i, (a, b) in enumerate(zip(opening, whole, strict=False)) if a != b), len(opening))
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


async def _ask(tokenizer: PreTrainedTokenizerBase, base_url: str, **config: Any) -> RoundTrip:
    async with SGLangClient(base_url, max_retries=0) as client:
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
            return RoundTrip(base_url, error=str(error))
        turns = model.trajectory.turns
        return RoundTrip(
            base_url=base_url,
            tokenizer_proven=facts.tokenizer_proven,
            context_length=facts.context_length,
            sampled_tokens=sum(len(turn.output_ids) for turn in turns),
            sequences=len(model.trajectory.sequences()),
            reason=turns[-1].reason,
        )


def report_lines(check: ModelCheck) -> Iterator[str]:
    """The report for people, line by line."""
    opens = "open in the generation prompt" if check.opens_reasoning else "not opened by the generation prompt"
    close = check.closes_reasoning
    facts: dict[str, Any] = {
        "model": check.model,
        "family": check.family or "not known: what can be derived from the chat template is used",
        "tool parser": check.tool_parser,
        "ends of a turn": " ".join(check.stops) or "none",
        "reasoning": f"{opens}; if cut off, "
        + ("nothing is known to close it" if close is None else f"closed with {close!r}"),
        "history": "writes earlier turns anew behind a user message (see history_policy)"
        if check.rewrites_history
        else "kept",
    }
    yield from (f"{name:<17}{fact}" for name, fact in facts.items())
    yield ""
    for case, reason in check.unproven.items():
        plain = " (proven without system prompt and tools)" if check.unproven_when_plain[case] is None else ""
        yield f"{case:<22} {'proven' if reason is None else f'UNPROVEN{plain}: {reason}'}"
    for piece in check.example:
        yield ""
        yield f"{piece.kind} ({len(piece.tokens)} tokens)"
        yield "  " + "|".join(repr(token)[1:-1] for token in piece.tokens)
    server = check.server
    if server is None:
        return
    facts = {"server": server.base_url}
    if server.error is not None:
        facts["FAILED"] = server.error
    else:
        facts |= {
            "tokenizer": "the served one" if server.tokenizer_proven else "not proven: no /tokenize there",
            "context": server.context_length or "not told",
            "round trip": f"{server.sampled_tokens} tokens sampled in two turns, {server.sequences} sequence(s)",
            "": f"the second call {server.reason}",
        }
    yield ""
    yield from (f"{name:<17}{fact}" for name, fact in facts.items())
