"""`SGLangModel`: a Strands model provider whose every call is one request with token ids in and token ids out.

Orchestration only. A call is attached to the recorded conversation that it extends (`trajectory`), its new messages
become prompt tokens (`chat_template`), one request is made (`client`), the sampled tokens are recorded, taken apart
into reasoning, text and tool calls (`tool_parsers`), and handed to the agent as stream events. The agent sees clean
messages; the exact tokens stay in the trajectory.

By its hooks a recording knows what became of an answer, where it would have to infer it from later calls. Strands tells
hooks when a model call begins and ends, whether it is repeated, and which message comes into the agent's history. An
answer that does not come into it was thrown away; one that another message stands for was replaced, or kept in another
form. Tool calls that did not parse get the provider's own error text as their result, so the history holds what the
model reads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

from pydantic import BaseModel, ValidationError
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    AgentInitializedEvent,
    BeforeModelCallEvent,
    HookOrder,
    HookProvider,
    HookRegistry,
    MessageAddedEvent,
)
from strands.models.model import Model
from strands.types.content import Messages, SystemContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolChoice, ToolSpec
from typing_extensions import Unpack, override

from ..client.cache import get_client
from ..client.client import SGLangClient
from ..exceptions import SGLangCancelledError
from ..messages import fingerprint, is_tool_name, is_unknown_tool, message_digest, plain_texts, system_text
from ..templates.chat_template import ChatTemplate, get_chat_template
from ..templates.image_tokens import ImageProcessor
from ..tool_choice import can_force
from ..tool_parsers import AUTO, ToolParser, ToolParseResult, get_tool_parser
from ..trajectory import Caller
from ..trajectory.episodes import (
    Episodes,
    begin_call,
    cycle_of,
    end_call,
    keep_written_names,
    known_agent,
    written_names,
)
from ..trajectory.tokens import TokenManager
from ..trajectory.trajectory import Trajectory
from .call import ChatRequest, ModelCall, OnRequest, stop_reason, stream_events
from .config import ModelConfig, check_keys
from .server_check import check_server, known_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

DEFAULT_TOOL_PARSER = "hermes"

_LONGEST_LOOK_S = 1.0


class RecordingHooks(HookProvider):
    """What a model listens to: `Agent(model=model, hooks=[model.hooks])`. It serves any number of agents."""

    def __init__(self, model: Any, episodes: Episodes) -> None:
        """Listen for a model.

        Args:
            model: The model.
            episodes: Its trajectories.
        """
        self._model = model
        self._episodes = episodes

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register the callbacks: before other hooks, and where these may have a call repeated, after them."""
        first, last = HookOrder.SDK_FIRST, HookOrder.SDK_LAST
        registry.add_callback(AgentInitializedEvent, self._made, order=first)
        registry.add_callback(BeforeModelCallEvent, self._asks, order=first)
        registry.add_callback(AfterModelCallEvent, self._answered, order=last)
        registry.add_callback(MessageAddedEvent, self._added, order=first)
        registry.add_callback(AfterToolCallEvent, self._ran_tool, order=first)
        registry.add_callback(AfterInvocationEvent, self._ended, order=last)

    def _made(self, event: AgentInitializedEvent) -> None:
        self._episodes.adopt(known_agent(event.agent))

    def _asks(self, event: BeforeModelCallEvent) -> None:
        agent = known_agent(event.agent)
        if event.agent.model is self._model:
            self._episodes.expect(agent)
        for call in list(agent.calls):
            is_of_this = call.invocation_state is event.invocation_state
            if call.is_over and (is_of_this or call.message is not None):
                call.close("the agent asked again without it")
        begin_call(agent, event.invocation_state)

    def _answered(self, event: AfterModelCallEvent) -> None:
        call = end_call(known_agent(event.agent), event.invocation_state)
        if call is not None and event.exception is not None:
            call.close(f"the call failed behind it: {type(event.exception).__name__}")
        elif call is not None and event.retry:
            call.close("a hook had the call repeated")

    def _added(self, event: MessageAddedEvent) -> None:
        agent, message = known_agent(event.agent), event.message
        waiting = [call for call in agent.calls if call.is_over and call.message is None]
        if waiting and message["role"] == "assistant":
            digest = message_digest(message)
            fitting = [call for call in waiting if any(turn.answer_digest == digest for turn in call.answers)]
            call = (fitting or waiting)[0]
            call.message, call.position = message, len(event.agent.messages) - 1

    def _ran_tool(self, event: AfterToolCallEvent) -> None:
        trajectory = known_agent(event.agent).trajectory
        recorded = None if trajectory is None else trajectory()
        if recorded is not None and is_unknown_tool(event.result):
            notice = recorded.result_notices.get(event.result["toolUseId"])
            if notice is not None:
                event.result = {**event.result, "content": [{"text": notice}]}

    def _ended(self, event: AfterInvocationEvent) -> None:
        for call in list(known_agent(event.agent).calls):
            if call.invocation_state is event.invocation_state:
                call.close("the agent's invocation ended without it")


class SGLangModel(Model):
    """Strands model provider for SGLang's native `/generate`, recording every token exactly.

    One object may serve several agents, event loops and threads; what it records is keyed by the conversations
    themselves. Call `reset()` before each episode.

    Example:
        >>> model = SGLangModel(tokenizer=tokenizer, base_url="http://localhost:30000")
        >>> agent = Agent(model=model, tools=[calculator])
        >>> result = await agent.invoke_async("What is 25 * 17?")
        >>> model.token_manager.token_ids, model.token_manager.loss_mask, model.token_manager.logprobs
    """

    class SGLangConfig(TypedDict, total=False):
        """Configuration of an `SGLangModel`.

        Attributes:
            model_id: Name of the model, for logs and traces.
            sampling_params: SGLang's sampling parameters. `max_new_tokens` left out means: what still fits the context.
            params: Earlier spelling of `sampling_params`.
            return_logprob: Record the logprobs of sampled tokens (default True).
            return_prompt_logprobs: Record those of prompt tokens too (default False: it defeats the prefix cache).
            return_routed_experts: Ask for the experts that each token was routed to (default False).
            enable_thinking: Shorthand for `chat_template_kwargs={"enable_thinking": ...}`.
            chat_template: Jinja text that replaces the tokenizer's chat template.
            chat_template_kwargs: Arguments for the chat template.
            family: Name of the model family (see `strands_sglang.families`), where the chat template does not tell it.
            escape_control_tokens: Encode control tokens such as `<|im_end|>` that stand in messages, tool results and
                tools as ordinary text, so that a prompt holds none but those that the chat template writes. By default
                they become control tokens, as on the server's own chat endpoint, and a warning says so once.
            history_policy: What becomes of sampled reasoning once a user message arrives, where the chat template
                strips it. "append" (default): it stays in context, and the sequence goes on. "template": the template's
                own form, which is a new sequence wherever the template would strip something.
            on_abort: What becomes of a call whose request the server aborts, as it does at weight updates and pauses.
                "raise" (default): `SGLangAbortedError`, with what was sampled recorded as a cut turn. "resume": the
                call goes on from the tokens that it has, within the same budget, and the agent notices nothing.
            context_window_limit: Context length in tokens by which Strands' context managers go; by default what the
                server tells, or `max_context_tokens` if that is less. It ends no call.
            max_context_tokens: Most tokens of prompt and answer together; a call that would have more ends as it does
                where the server's context is full, which always holds.
            routing_key: Sends all calls to the same server; by default one key per root conversation of an episode,
                so that what is said next finds its prefix in that server's cache.
            request_fields: Further top-level fields of SGLang's `/generate`, sent with every request and recorded on
                its turn: `lora_path`, `priority`, `return_sampling_mask`, ... (`strands_sglang.request_fields` lists
                them). Names and types are checked.
            unchecked_request_fields: The same without the check, for fields that only a newer server knows.
        """

        model_id: str | None
        sampling_params: dict[str, Any] | None
        params: dict[str, Any] | None
        return_logprob: bool | None
        return_prompt_logprobs: bool | None
        return_routed_experts: bool | None
        enable_thinking: bool | None
        chat_template: str | None
        chat_template_kwargs: dict[str, Any] | None
        family: str | None
        escape_control_tokens: bool | None
        history_policy: Literal["append", "template"] | None
        on_abort: Literal["raise", "resume"] | None
        context_window_limit: int | None
        max_context_tokens: int | None
        routing_key: str | None
        request_fields: dict[str, Any] | None
        unchecked_request_fields: dict[str, Any] | None

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        client: SGLangClient | None = None,
        base_url: str | Sequence[str] | None = None,
        tool_parser: ToolParser | str | None = None,
        processor: ProcessorMixin | None = None,
        **config: Unpack[SGLangConfig],
    ) -> None:
        """Set up the model. Nothing is sent until the first call.

        Args:
            tokenizer: The Hugging Face tokenizer of the served model. A copy of it is used, as it is now.
            client: A client to use. Exactly one of `client` and `base_url` must be given.
            base_url: URL of an SGLang server, or those of several; models with the same share one pooled client.
            tool_parser: How the model writes tool calls: a parser, or the name of one. By default the one of the model
                family that the chat template belongs to, and "hermes" for a family that has none or is not known.
            processor: The Hugging Face processor of a served model that takes images; its tokenizer must be
                `tokenizer`. Without it, images are an error.
            **config: See `SGLangConfig`.

        Raises:
            ValueError: Neither or both of `client` and `base_url`; a tokenizer without a chat template; an unknown tool
                parser; both `sampling_params` and `params`; a processor for a chat template without images; an unknown
                key of the configuration.
        """
        if (client is None) == (base_url is None):
            given = "neither was" if client is None else "both were"
            raise ValueError(f"pass exactly one of client= and base_url=; {given} given")
        self.client: SGLangClient = client if client is not None else get_client(cast(Any, base_url))
        self.tokenizer = tokenizer
        self.processor = processor
        self.images: ImageProcessor | None = None
        self.config: dict[str, Any] = {}
        self.on_request: OnRequest | None = None
        # A parser that is not named goes with the chat template, which can be changed later.
        self._parser_name = tool_parser
        if isinstance(tool_parser, ToolParser):
            self.tool_parser = tool_parser
        elif tool_parser not in (None, AUTO):
            self.tool_parser = get_tool_parser(tool_parser)
        self.update_config(**config)
        self._episodes = Episodes()

    def _find_tool_parser(self, template: ChatTemplate, chat_template: str | None) -> ToolParser:
        """The parser of the model family; where none is known, "auto" is an error and the default is Hermes."""
        known = template.family.tool_parser if template.family is not None else None
        if self._parser_name == AUTO and known is None:
            return get_tool_parser(AUTO, tokenizer=self.tokenizer, chat_template=chat_template)
        return get_tool_parser(known or DEFAULT_TOOL_PARSER)

    # --- configuration ---

    @override
    def update_config(self, **model_config: Unpack[SGLangConfig]) -> None:  # type: ignore[override]
        """Change the configuration; the next call uses it.

        Raises:
            ValueError: An unknown key; both `sampling_params` and `params`; a value that cannot be used, or such a chat
                template.
        """
        changed = dict(model_config)
        check_keys(changed, self.SGLangConfig.__annotations__)
        earlier = changed.pop("params", None)
        if earlier is not None:
            if changed.get("sampling_params") is not None:
                raise ValueError("pass sampling_params= only; params= is its earlier spelling")
            changed["sampling_params"] = earlier
        settings, config = ModelConfig.read({**self.config, **changed})
        template = get_chat_template(
            self.tokenizer,
            settings.chat_template,
            settings.template_arguments,
            settings.family,
            escape_control_tokens=settings.escape_control_tokens,
        )
        finds_parser = self._parser_name in (None, AUTO)
        parser = self._find_tool_parser(template, settings.chat_template) if finds_parser else self.tool_parser
        self.images = None if self.processor is None else ImageProcessor(self.processor, template)
        self.chat_template, self.tool_parser, self.config = template, parser, config

    @override
    def get_config(self) -> SGLangConfig:
        """The configuration in force."""
        return cast(SGLangModel.SGLangConfig, self.config)

    @property
    def _settings(self) -> ModelConfig:
        """The configuration as it is now: whoever has it from `config` may have changed it."""
        return ModelConfig.read(self.config)[0]

    # --- what was recorded ---

    def reset(self) -> None:
        """Start a new episode: an empty trajectory. What was read from the old one stays valid.

        Raises:
            RuntimeError: The code is inside `with model.episode()`, which has a trajectory of its own.
        """
        self.trajectory = Trajectory()

    def episode(self) -> AbstractContextManager[Trajectory]:
        """Give an episode a trajectory of its own: `with model.episode() as trajectory:`.

        Several episodes can run on one model at once, in tasks or threads of their own; inside, `trajectory`,
        `token_manager` and the rest are the episode's. Once it has ended it takes no further call: what its tasks still
        ask is recorded in the episode that then runs, or, with a warning, outside where there is none or several.
        """
        return self._episodes.episode()

    @property
    def auxiliary(self) -> AuxiliaryModel:
        """This model for helpers: a judge, a writer of summaries, any agent whose answers are not to be trained.

        `Agent(model=model.auxiliary)` for a helper of your own, `Agent(model=model, aux_model=model.auxiliary)` for
        those that Strands makes. Their calls are recorded in the same trajectory as auxiliary: `token_manager` leaves
        them aside, and `trajectory.sequences(auxiliary=True)` has them.
        """
        return AuxiliaryModel(self)

    @property
    def hooks(self) -> RecordingHooks:
        """Hooks by which Strands tells what becomes of an answer: `Agent(model=model, hooks=[model.hooks])`.

        Without them that is inferred from the agent's later calls and its messages, which cannot tell everything; see
        docs/histories.md. With them, a tool call that did not parse also has the provider's error text as its result in
        the agent's history.
        """
        return RecordingHooks(self, self._episodes)

    @property
    def trajectory(self) -> Trajectory:
        """All calls of the episode that the running code belongs to."""
        return self._episodes.current

    @trajectory.setter
    def trajectory(self, trajectory: Trajectory) -> None:
        if self._episodes.is_inside:
            raise RuntimeError("inside `with model.episode()` the trajectory is the episode's: open another one")
        self._episodes.outside = trajectory

    @property
    def tool_parse_errors(self) -> dict[str, int]:
        """How many tool calls of this episode did not parse, by the name that they seemed to mean."""
        return self.trajectory.tool_parse_errors

    @property
    def token_manager(self) -> TokenManager:
        """The latest sequence of the main conversation, as a snapshot; all sequences are in `trajectory`.

        A warning says once per trajectory if there is more than that one to train.
        """
        return self.trajectory.latest_main_sequence(warn=True)

    @property
    def rollout(self) -> TokenManager:
        """The same as `token_manager`."""
        return self.token_manager

    # --- what Strands' context managers ask ---

    @property
    @override
    def context_window_limit(self) -> int | None:
        """Context length in tokens: what is configured, or what the server said; None before it was asked."""
        settings = self._settings
        if settings.context_window_limit is not None:
            return settings.context_window_limit
        facts = known_facts(self.client, self.chat_template)
        limits = (settings.max_context_tokens, None if facts is None else facts.context_length)
        return min((limit for limit in limits if limit is not None), default=None)

    @override
    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Count the tokens that messages have in front of the model: those recorded, and exactly those to be added.

        Strands counts before every call, as a rule only the messages behind the last answer; without `tool_specs` and a
        system prompt, messages are taken for such a part unless they begin a recorded conversation. Nothing is
        recorded. What no prompt can be made of is counted as plain text. The first time, the server is asked for its
        context length.

        Args:
            messages: A conversation, or messages that follow an answer.
            tool_specs: The tools of a whole conversation.
            system_prompt: Its system prompt.
            system_prompt_content: The same as content blocks, used if `system_prompt` is None.
        """
        if known_facts(self.client, self.chat_template) is None:
            try:  # the call itself waits for the server as it has to
                await asyncio.wait_for(check_server(self.client, self.chat_template), _LONGEST_LOOK_S)
            except Exception as error:
                logger.debug("error=<%s> | counting before the server has said its context length", error)
        system = system_text(system_prompt, cast(Any, system_prompt_content))
        try:
            return await self._call(messages, tool_specs, system, self.trajectory).count()
        except Exception as error:
            logger.debug("error=<%s> | counting plain text", error)
            texts = [system or "", *(text for message in messages for text in plain_texts(message["content"]))]
            return sum(len(self.chat_template.encode(text)) for text in texts)

    # --- calls ---

    @property
    def _supports_structured_output(self) -> bool:  # type: ignore[override]
        """Whether Strands' forced retry leaves the list of tools as it is, so that the sequence is extended."""
        return can_force(self.tool_parser)

    @override
    async def stream(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        *,
        tool_choice: ToolChoice | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
        cancel_signal: threading.Event | None = None,
        auxiliary: bool | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Make one model call and stream its answer as Strands events.

        The answer is recorded before the first event is given out, so the record is complete even if the consumer
        stops.

        Args:
            messages: The whole conversation.
            tool_specs: The tools that the model may call.
            system_prompt: The system prompt.
            tool_choice: `{"any": {}}` or `{"tool": {"name": ...}}` forces a call by constrained decoding; its tokens
                are off-policy and have loss mask 0. Where the format has no grammar, a warning says so.
            system_prompt_content: The system prompt as content blocks, used if `system_prompt` is None.
            cancel_signal: Once it is set, the request is aborted, what was sampled until then is recorded as a cut
                turn, and the stream ends with the stop reason "cancelled". `agent.cancel()` sets it.
            auxiliary: Whether the call is a helper's, and not to be trained; see the property of this name. Left out,
                a call from outside an agent's loop is one if an agent has asked before it. It stays what it is.
            **kwargs: Whatever else Strands passes.

        Yields:
            Strands stream events.

        Raises:
            ContextWindowOverflowException: The context has no room for the prompt.
            SGLangAbortedError: The server aborted the request; what it had sampled is recorded as a cut turn.
            SGLangClientError: The server or the network failed after all retries.
            ModelThrottledException: The server is too busy and the client was told not to retry (`max_retries=0`).
            UnsupportedContentError: A message holds content that cannot be rendered.
            ValueError: A tool has the name that stands for calls that do not parse; the tool choice names a tool that
                is not there, or `sampling_params` hold a grammar already.
        """
        if any(spec["name"] == ToolParseResult.UNKNOWN_NAME for spec in tool_specs or ()):
            raise ValueError(
                f"a tool is named {ToolParseResult.UNKNOWN_NAME!r}, as calls that do not parse are, so every such call "
                "would run it; give the tool another name"
            )
        if kwargs.get("structured_output_model") is not None and not can_force(
            self.tool_parser, tool_specs, cast(Any, tool_choice)
        ):
            # The tool that a choice names alone, which Strands hands to models that cannot force it; else all of them.
            name = cast(Any, tool_choice or {}).get("tool", {}).get("name")
            tool_specs = [spec for spec in tool_specs or () if spec["name"] == name] or tool_specs
        state, invocation = kwargs.get("model_state"), kwargs.get("invocation_state")
        origin = self._episodes.of_call(state, invocation)
        # Made of what the model is now: `update_config` and `reset` while the request is on its way are for the next.
        call = self._call(
            messages,
            tool_specs,
            system_text(system_prompt, cast(Any, system_prompt_content)),
            origin.trajectory,
            caller=Caller(origin.agent, cycle_of(invocation), auxiliary),
            names=written_names(state),
            cancel_signal=cancel_signal,
        )
        try:
            generation = await call.sample(tool_choice)
        except SGLangCancelledError:
            # Strands looks at its signal when an event arrives, so it needs one, and goes no further than that.
            yield {"messageStart": {"role": "assistant"}}
            yield {"messageStop": {"stopReason": "cancelled"}}
            return
        parsed, blocks = call.record(generation)
        origin.note(call.turn)
        keep_written_names(state, {call.id: call.name for call in parsed.tool_calls if not is_tool_name(call.name)})
        for event in stream_events(blocks, stop_reason(generation, parsed), generation):
            yield event
            _observe_cancellation(invocation, cancel_signal)

    @override
    async def structured_output(
        self, output_model: type[T], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Sample an instance of a pydantic model, constrained by its JSON schema.

        The tokens are recorded in a sequence of their own with loss mask 0: a grammar chose among them, so they are not
        on-policy.

        Args:
            output_model: What to produce.
            prompt: The conversation.
            system_prompt: The system prompt.
            **kwargs: A `cancel_signal`, as for `stream`; whatever else is ignored.

        Yields:
            `{"output": <instance of output_model>}`.

        Raises:
            ValueError: The sampled text is not valid for `output_model`, e.g. because it was cut off.
            SGLangCancelledError: The signal was set.
            SGLangClientError: As for `stream`.
        """
        call = self._call(
            prompt,
            None,
            system_prompt,
            self._episodes.of_call(None).trajectory,
            caller=Caller(auxiliary=True),
            cancel_signal=kwargs.get("cancel_signal"),
            json_schema=json.dumps(output_model.model_json_schema()),
        )
        generation = await call.sample()
        parsed, _ = call.record(generation)
        try:
            output = output_model.model_validate_json(parsed.text)
        except ValidationError as error:
            raise ValueError(
                f"the sampled text is no {output_model.__name__} (finish reason {generation.finish_type}): {error}"
            ) from error
        yield {"output": output}

    def _call(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None,
        system: str | None,
        trajectory: Trajectory,
        **about: Any,
    ) -> ModelCall:
        """A call of the model as it is now."""
        template, parser = self.chat_template, self.tool_parser
        parts = {"system prompt": system, "tools": tool_specs or None, **template.identity}
        chat = ChatRequest(messages, tool_specs, system, fingerprint(parts, messages))
        return ModelCall(
            chat, trajectory, self.client, template, parser, self.images, self._settings, self.on_request, **about
        )


def _observe_cancellation(invocation_state: Any, cancel_signal: threading.Event | None) -> None:
    """Let a signal that the agent's caller has set take effect now.

    Strands copies it to the agent's own, `cancel_signal`, by a task that looks every 50 ms, and an answer that has all
    come is given out in less. Graphs share an invocation state, so its agent may be another one.

    Args:
        invocation_state: What Strands passed under that name.
        cancel_signal: Likewise.
    """
    agent = invocation_state.get("agent") if isinstance(invocation_state, dict) else None
    observe = getattr(agent, "_observe_cancellation", None)
    if cancel_signal is not None and observe is not None and getattr(agent, "cancel_signal", None) is cancel_signal:
        observe()


class AuxiliaryModel(Model):
    """A view of a model: the same server, configuration and trajectory, and every call is auxiliary.

    Strands does not tell a provider what a call is for, so an agent that judges looks like one that is trained. Whoever
    makes the agent knows, and says so by the model that the agent gets. That holds in every thread, event loop and
    context, and for helpers that Strands makes by itself from `Agent(aux_model=...)`.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Model) -> None:
        """Look at a model, which must take `auxiliary=True` in `stream`."""
        self.model = model

    def __getattr__(self, name: str) -> Any:
        """What else there is of the model: its tokenizer, client, trajectory, configuration and so on."""
        if name == "model":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def auxiliary(self) -> AuxiliaryModel:
        """This."""
        return self

    @property
    def _supports_structured_output(self) -> bool:  # type: ignore[override]
        return self.model._supports_structured_output

    @property
    @override
    def context_window_limit(self) -> int | None:
        """As the model's."""
        return self.model.context_window_limit

    @override
    async def count_tokens(self, *args: Any, **kwargs: Any) -> int:
        """As the model's `count_tokens`."""
        return await self.model.count_tokens(*args, **kwargs)

    @override
    def update_config(self, **model_config: Any) -> None:
        """Change the configuration of the model, for everybody."""
        self.model.update_config(**model_config)

    @override
    def get_config(self) -> Any:
        """The configuration of the model, as it is now."""
        return self.model.get_config()

    @override
    def stream(self, *args: Any, **kwargs: Any) -> AsyncIterable[StreamEvent]:
        """As the model's `stream`; the call is auxiliary."""
        return self.model.stream(*args, **{**kwargs, "auxiliary": True})

    @override
    def structured_output(
        self, output_model: type[T], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """As the model's `structured_output`, which is auxiliary in any case."""
        return self.model.structured_output(output_model, prompt, system_prompt, **kwargs)
