"""`SGLangModel`: a Strands model provider whose calls send token ids and get token ids back.

This module only orchestrates. A call is attached to the recorded conversation that it extends (`trajectory`), and its
new messages become prompt tokens (`templates`). The client makes the request. The sampled tokens are recorded, parsed
into reasoning, text and tool calls (`tool_parsers`), and streamed to the agent as events. The agent sees clean
messages; the exact tokens stay in the trajectory.

With the model's hooks, a trajectory knows which answers an agent kept; without them it infers this from later calls.
Strands tells hooks when a model call begins and ends, whether it is retried, and which message enters the agent's
history. An answer that does not enter the history was discarded. If another message enters instead, the answer was
replaced or kept in another form. The hooks also replace Strands' result of a tool call that did not parse with the
parser's error message, so that the history holds what the model reads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

from anyio import to_thread
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

from ..client.client import SGLangClient
from ..client.shared import get_client
from ..exceptions import SGLangCancelledError
from ..messages import blocks_of, is_tool_name, is_unknown_tool, message_digest, plain_texts, system_text
from ..reasons import Reason
from ..templates.chat_template import ChatTemplate, get_chat_template
from ..templates.image_tokens import ImageProcessor
from ..tool_choice import can_force
from ..tool_parsers import AUTO, ToolParser, ToolParseResult, get_tool_parser
from ..trajectory import Caller
from ..trajectory.episodes import (
    RunningEpisodes,
    begin_call,
    cycle_of,
    end_call,
    keep_written_names,
    known_agent,
    written_names,
)
from ..trajectory.sessions import Sessions
from ..trajectory.tokens import TokenManager
from ..trajectory.trajectory import OUTSIDE, Trajectory
from .call import ChatRequest, ModelCall, OnRequest, encoded, stop_reason, stream_events
from .config import ModelConfig, check_keys
from .server_check import check_server, known_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

DEFAULT_TOOL_PARSER = "hermes"

_CONTEXT_LENGTH_TIMEOUT_S = 1.0

_configuring = threading.RLock()
"""Held while a configuration changes, with what depends on it, and while a call takes it. One for all models, which can
then be copied."""


class RecordingHooks(HookProvider):
    """Hooks that record which answers an agent keeps; they serve any number of agents."""

    def __init__(self, model: Any, episodes: RunningEpisodes) -> None:
        """Create the hooks of a model.

        Args:
            model: The model.
            episodes: The model's trajectories.
        """
        self._model = model
        self._episodes = episodes

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register the callbacks: first for most events, last for those on which other hooks may retry a call."""
        first, last = HookOrder.SDK_FIRST, HookOrder.SDK_LAST
        registry.add_callback(AgentInitializedEvent, self._on_agent_initialized, order=first)
        registry.add_callback(BeforeModelCallEvent, self._before_model_call, order=first)
        registry.add_callback(AfterModelCallEvent, self._after_model_call, order=last)
        registry.add_callback(MessageAddedEvent, self._on_message_added, order=first)
        registry.add_callback(AfterToolCallEvent, self._after_tool_call, order=first)
        registry.add_callback(AfterInvocationEvent, self._after_invocation, order=last)

    def _on_agent_initialized(self, event: AgentInitializedEvent) -> None:
        self._episodes.adopt(known_agent(event.agent))

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:
        agent = known_agent(event.agent)
        if event.agent.model is self._model:
            self._episodes.expect(agent)
        for call in list(agent.calls):
            is_same_invocation = call.invocation_state is event.invocation_state
            if call.is_over and (is_same_invocation or call.message is not None):
                call.close(Reason("asked_without"))
        begin_call(agent, event.invocation_state)

    def _after_model_call(self, event: AfterModelCallEvent) -> None:
        call = end_call(known_agent(event.agent), event.invocation_state)
        if call is not None and event.exception is not None:
            call.close(Reason("failed_after", detail=(type(event.exception).__name__,)))
        elif call is not None and event.retry:
            call.close(Reason("hook_retried"))

    def _on_message_added(self, event: MessageAddedEvent) -> None:
        agent, message = known_agent(event.agent), event.message
        waiting = [call for call in agent.calls if call.is_over and call.message is None]
        if waiting and message["role"] == "assistant":
            digest = message_digest(message)
            matching = [call for call in waiting if any(turn.answer_digest == digest for turn in call.answers)]
            call = (matching or waiting)[0]
            call.message, call.position = message, len(event.agent.messages) - 1

    def _after_tool_call(self, event: AfterToolCallEvent) -> None:
        trajectory = known_agent(event.agent).trajectory
        recorded = None if trajectory is None else trajectory()
        if recorded is not None and is_unknown_tool(event.result):
            notice = recorded.result_notices.get(event.result["toolUseId"])
            if notice is not None:
                event.result = {**event.result, "content": [{"text": notice}]}

    def _after_invocation(self, event: AfterInvocationEvent) -> None:
        for call in list(known_agent(event.agent).calls):
            if call.invocation_state is event.invocation_state:
                call.close(Reason("ended_without"))


class SGLangModel(Model):
    """Strands model provider for SGLang's native `/generate` endpoint that records every token exactly.

    One model may serve several agents, event loops and threads: calls are matched by their conversations, never by a
    cursor. Call `reset()` before each episode, or give each episode a trajectory of its own with `episode()`.

    Attributes:
        client: The client that sends the requests.
        tokenizer: The tokenizer that was passed.
        processor: The processor that was passed; None for a model without images.
        chat_template: The chat template in use.
        tool_parser: The parser of the model's tool calls.
        images: The image processor of the chat template; None without `processor`.
        config: The configuration, by key.
        on_request: Called with each turn and its planned request; returns the request to send. Trainers set it.

    Examples:
        >>> from strands import Agent
        >>> from strands_sglang import SGLangModel, get_tokenizer
        >>> model = SGLangModel(
        ...     tokenizer=get_tokenizer("Qwen/Qwen3-4B-Instruct-2507"),
        ...     base_url="http://localhost:30000",
        ...     sampling_params={"temperature": 1.0, "max_new_tokens": 1024},
        ... )
        >>> agent = Agent(model=model, callback_handler=None)
        >>> result = agent("What is 25 * 17?")
        >>> rollout = model.token_manager
        >>> len(rollout.token_ids) == len(rollout.loss_mask) == len(rollout.logprobs)
        True
    """

    class SGLangConfig(TypedDict, total=False):
        """Configuration of an `SGLangModel`: its keyword arguments, and those of `update_config`.

        Attributes:
            model_id: Name of the model in logs and traces.
            sampling_params: SGLang's sampling parameters. Without `max_new_tokens`, an answer may fill the rest of the
                context. A grammar among them (`json_schema`, `regex`, ...) makes all sampled tokens off-policy: they
                get loss mask 0.
            params: Alias of `sampling_params`. Passing both is an error.
            return_logprob: Record the logprobs of sampled tokens (default True).
            return_prompt_logprobs: Record the logprobs of prompt tokens too, and those of sampled tokens in any case
                (default False). The server then cannot use its prefix cache.
            return_routed_experts: Record the experts that each token was routed to (default False).
                `turn.generation.expert_ids()` returns them. An answer without them is an error. Start the server with
                `--enable-return-routed-experts` and without `--enable-hierarchical-cache`, which returns stale rows.
            enable_thinking: Shorthand for `chat_template_kwargs={"enable_thinking": ...}`, for models that think on
                demand.
            chat_template: Jinja text that replaces the tokenizer's chat template.
            chat_template_kwargs: Arguments of the chat template.
            family: Name of the model family, for a chat template that does not identify it.
            escape_control_tokens: Encode control tokens such as `<|im_end|>` in messages, tool results and tools as
                ordinary text (default False). A prompt then holds only the control tokens that the chat template
                writes. Otherwise they become real control tokens, as on the server's own chat endpoint, and a warning
                is logged once.
            history_policy: What to do with sampled reasoning when a user message arrives and the chat template strips
                it. `"append"` (default) keeps it in the context and extends the sequence. `"template"` uses the
                template's own form, and starts a new sequence wherever the template would strip something.
            on_abort: What to do when the server aborts a request, as it does at weight updates and pauses. `"raise"`
                (default) raises [`SGLangAbortedError`][strands_sglang.SGLangAbortedError] and records what was sampled
                as a cut turn. `"resume"` continues from the sampled tokens within the same token budget; the agent
                notices nothing. An answer under a grammar begins again.
            context_window_limit: Context length in tokens that Strands' context managers use. It ends no call. By
                default the server's context length, or `max_context_tokens` if that is less.
            max_context_tokens: Maximum number of tokens of prompt and answer together. At the limit a call ends as it
                does at the end of the server's context, which always applies.
            routing_key: Key that sends all calls to the same one of several servers. By default each root conversation
                of an episode has its own key, so that its next call finds its prefix in that server's cache.
            random_seeds: Send a random `sampling_seed` with every request whose `sampling_params` hold none (default
                False). A server with `--enable-deterministic-inference` uses the seed 42 for requests without one, so
                all samples of one prompt would be the same.
            request_fields: Further top-level fields of SGLang's `/generate`. They are sent with every request,
                including those of helpers, and recorded as `turn.request_fields`. The
                [guide](../guides/model-features.md#request-fields) lists them. Names and types are checked, because
                SGLang ignores fields that it does not know. Fields that exact recording depends on, such as
                `input_ids`, `stream` or `rid`, are errors.
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
        random_seeds: bool | None
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
        sessions: str | PathLike[str] | None = None,
        **config: Unpack[SGLangConfig],
    ) -> None:
        """Set up the model. Nothing is sent until the first call.

        Args:
            tokenizer: The Hugging Face tokenizer of the served model. The model uses a copy. Tokens that you add to the
                tokenizer later are known only to models that you create, or reconfigure, after that.
            client: The client to use. Pass exactly one of `client` and `base_url`.
            base_url: URL of an SGLang server, or the URLs of several. Models with the same URLs share one client.
            tool_parser: How the model writes tool calls: a parser, or the name of one. By default the parser of the
                model family that the chat template belongs to, or `"hermes"` if the family has none or is unknown.
            processor: The Hugging Face processor of a model that takes images. Its tokenizer must be `tokenizer`.
                Without it, images are an error.
            sessions: Folder in which the tokens of agents are kept for their sessions and snapshots, one file per
                trajectory. An agent that Strands restores then continues its recorded sequence. It is part of the
                trajectory of its first call if that holds no other call. The folder may be shared by models and
                processes. By default the history of a restored agent is prompt.
            **config: See `SGLangConfig`. `update_config` can change these later.

        Raises:
            ValueError: Neither or both of `client` and `base_url` are given, the tokenizer has no chat template, the
                tool parser or a configuration key is unknown, a value is invalid, both `sampling_params` and `params`
                are given, or a processor is given for a chat template without images.
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
        # An unnamed parser follows the chat template, which can change later.
        self._parser_name = tool_parser
        if isinstance(tool_parser, ToolParser):
            self.tool_parser = tool_parser
        elif tool_parser not in (None, AUTO):
            self.tool_parser = get_tool_parser(tool_parser)
        self.update_config(**config)
        self._episodes = RunningEpisodes()
        self._sessions = None if sessions is None else Sessions(sessions)

    def _find_tool_parser(self, template: ChatTemplate, chat_template: str | None) -> ToolParser:
        """Find the parser of the model family. If it is unknown, "auto" is an error and the default is Hermes."""
        known = template.family.tool_parser if template.family is not None else None
        if self._parser_name == AUTO and known is None:
            return get_tool_parser(AUTO, tokenizer=self.tokenizer, chat_template=chat_template)
        return get_tool_parser(known or DEFAULT_TOOL_PARSER)

    # --- configuration ---

    @override
    def update_config(self, **model_config: Unpack[SGLangConfig]) -> None:  # type: ignore[override]
        """Change the configuration, starting with the next call.

        Args:
            **model_config: The keys to change; see `SGLangConfig`.

        Raises:
            ValueError: A key is unknown, both `sampling_params` and `params` are given, or a value or chat template is
                invalid.
        """
        changed = dict(model_config)
        check_keys(changed, self.SGLangConfig.__annotations__)
        earlier = changed.pop("params", None)
        if earlier is not None:
            if changed.get("sampling_params") is not None:
                raise ValueError("pass only sampling_params=; params= is an alias of it")
            changed["sampling_params"] = earlier
        with _configuring:
            settings, known = ModelConfig.read({**self.config, **changed})
            self._render_with(settings)
            self.config = ModelConfig.read(known)[1]
            self._read = (known, settings)

    def _render_with(self, settings: ModelConfig) -> None:
        """Take the chat template of a configuration, and what depends on it."""
        template = get_chat_template(self.tokenizer, *settings.rendering)
        finds_parser = self._parser_name in (None, AUTO)
        parser = self._find_tool_parser(template, settings.chat_template) if finds_parser else self.tool_parser
        self.images = None if self.processor is None else ImageProcessor(self.processor, template)
        self.chat_template, self.tool_parser = template, parser

    @override
    def get_config(self) -> SGLangConfig:
        """Return the current configuration."""
        return cast(SGLangModel.SGLangConfig, self.config)

    @property
    def _settings(self) -> ModelConfig:
        """The checked configuration. It is read again if it changed: callers can change `config` in place."""
        with _configuring:
            known, settings = self._read
            if known != self.config:
                before = settings
                settings, known = ModelConfig.read(self.config)
                if settings.rendering != before.rendering:
                    self._render_with(settings)
                self._read = (known, settings)
            return settings

    # --- the record ---

    def reset(self) -> None:
        """Start a new episode with an empty trajectory. Objects read from the old one stay valid.

        An agent of a model with `sessions` that continues its conversation after that brings its trajectory along.

        Raises:
            RuntimeError: The caller is inside `with model.episode()`, which has a trajectory of its own.
        """
        self.trajectory = Trajectory()

    def episode(self, trajectory: Trajectory | None = None) -> AbstractContextManager[Trajectory]:
        """Open a trajectory for one episode: `with model.episode() as trajectory:`.

        Several episodes can run on one model at once, each in its own task or thread. Inside, `trajectory`,
        `token_manager` and the other properties are the episode's. An episode that has ended records no further calls.
        Later calls of its tasks are recorded in the only episode still running; if there is none or more than one, they
        are recorded outside of all episodes, with a warning.

        Args:
            trajectory: The trajectory to continue, as read from a file or a journal; None for a new one.

        Returns:
            A context manager that yields the episode's [`Trajectory`][strands_sglang.Trajectory].
        """
        return self._episodes.episode(trajectory)

    @property
    def auxiliary(self) -> AuxiliaryModel:
        """This model for helpers whose answers are not trained: judges, guards, summarizers.

        Your own helpers take it as their model: `Agent(model=model.auxiliary)`. For helpers that Strands creates, pass
        it as `Agent(model=model, aux_model=model.auxiliary)`. Their calls are recorded in the same trajectory as
        auxiliary: `token_manager` skips them, and `trajectory.sequences(auxiliary=True)` includes them.
        """
        return AuxiliaryModel(self)

    def continue_as(self, agent: Any, id: str) -> None:
        """Record the calls of an agent as those of an agent of the trajectory, which it continues.

        Args:
            agent: A Strands agent with the model's hooks, before its first call.
            id: The `Turn.agent` of the other one's calls.
        """
        known_agent(agent).id = id

    @property
    def hooks(self) -> RecordingHooks:
        """Hooks that record which answers an agent keeps: `Agent(model=model, hooks=[model.hooks])`.

        Without them the trajectory infers this from the agent's later calls and its messages, which cannot always tell.
        With them, the result of a tool call that did not parse is also replaced by the parser's error message in the
        agent's history.
        """
        return RecordingHooks(self, self._episodes)

    @property
    def trajectory(self) -> Trajectory:
        """All calls of the current episode: the one of the running code, else the one since `reset()`.

        It can be set, for example to a loaded trajectory, except inside `with model.episode()`.
        """
        return self._episodes.current

    @trajectory.setter
    def trajectory(self, trajectory: Trajectory) -> None:
        if self._episodes.is_inside:
            raise RuntimeError("the trajectory cannot be replaced inside `with model.episode()`; open another episode")
        self._episodes.outside = trajectory

    @property
    def tool_parse_errors(self) -> dict[str, int]:
        """Number of tool calls of this episode that did not parse, by the tool name that they seemed to mean."""
        return self.trajectory.tool_parse_errors

    @property
    def token_manager(self) -> TokenManager:
        """The latest sequence of the main conversation, as a snapshot.

        `trajectory.sequences()` returns all sequences. If others hold tokens to train too, a warning is logged once per
        trajectory.
        """
        return self.trajectory.latest_main_sequence(warn=True)

    @property
    def rollout(self) -> TokenManager:
        """Alias of `token_manager`."""
        return self.token_manager

    # --- for Strands' context managers ---

    @property
    @override
    def context_window_limit(self) -> int | None:
        """Context length in tokens: the configured one, or the server's. None if neither is known yet."""
        settings = self._settings
        if settings.context_window_limit is not None:
            return settings.context_window_limit
        source, facts = self.trajectory.source, known_facts(self.client, self.chat_template)
        known = None if facts is None else facts.context_length
        limits = (settings.max_context_tokens, known if source is None else source.recorded.context_length)
        return min((limit for limit in limits if limit is not None), default=None)

    @override
    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Count the prompt tokens of messages: the recorded ones exactly, plus those that a call would add.

        Strands counts before every call, usually only the messages after the last answer. Messages without `tool_specs`
        and a system prompt count as such a part, unless they begin a recorded conversation. Nothing is recorded.
        Messages that cannot be rendered are counted as plain text. The first count asks the server for its context
        length.

        Args:
            messages: A conversation, or messages that follow an answer.
            tool_specs: The tools of a whole conversation.
            system_prompt: The system prompt of a whole conversation.
            system_prompt_content: The system prompt as content blocks, used if `system_prompt` is None.

        Returns:
            Number of tokens.
        """
        if self.trajectory.source is None and known_facts(self.client, self.chat_template) is None:
            try:  # the call itself waits as long as needed
                await asyncio.wait_for(check_server(self.client, self.chat_template), _CONTEXT_LENGTH_TIMEOUT_S)
            except Exception as error:
                logger.debug("error=<%s> | counting before the server's context length is known", error)
        system = system_text(system_prompt, cast(Any, system_prompt_content))
        try:
            return await self._call(messages, tool_specs, system, self.trajectory).count()
        except Exception as error:
            logger.debug("error=<%s> | counting plain text", error)
            texts = [system or "", *plain_texts(list(blocks_of(messages)))]
            return await encoded(messages, lambda: sum(len(self.chat_template.encode(text)) for text in texts))

    # --- calls ---

    @property
    def _supports_structured_output(self) -> bool:  # type: ignore[override]
        """Whether Strands' forced retry leaves the tools unchanged, so that it extends the sequence."""
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

        The answer is recorded before the first event is yielded, so the record is complete even if the consumer stops
        early.

        Args:
            messages: The whole conversation.
            tool_specs: The tools that the model may call.
            system_prompt: The system prompt.
            tool_choice: `{"any": {}}` or `{"tool": {"name": ...}}` forces a call by constrained decoding. Its tokens
                are off-policy and get loss mask 0. If the tool's format or schema has no exact grammar, a warning is
                logged and nothing is forced.
            system_prompt_content: The system prompt as content blocks, used if `system_prompt` is None.
            cancel_signal: Event that cancels the call. Once set, the request is aborted, the sampled tokens are
                recorded as a cut turn, and the stream ends with the stop reason `"cancelled"`. `agent.cancel()` sets
                it.
            auxiliary: Whether the call belongs to a helper and is not trained. By default a call from outside an
                agent's loop is auxiliary if an agent has asked before it. The value is fixed once the call is made.
            **kwargs: Further arguments from Strands.

        Yields:
            Strands stream events.

        Raises:
            ContextWindowOverflowException: The prompt leaves no room in the context.
            SGLangAbortedError: The server aborted the request; the sampled tokens are recorded as a cut turn.
            SGLangClientError: The server or the network failed after all retries.
            ModelThrottledException: The server is too busy and the client does not retry (`max_retries=0`).
            UnsupportedContentError: A message holds content that cannot be rendered.
            ValueError: A tool has the name reserved for calls that do not parse, the tool choice names an unknown tool,
                or `sampling_params` already hold a grammar.
        """
        if any(spec["name"] == ToolParseResult.UNKNOWN_NAME for spec in tool_specs or ()):
            raise ValueError(
                f"a tool is named {ToolParseResult.UNKNOWN_NAME!r}, the name of calls that do not parse, so every such "
                "call would run it; rename the tool"
            )
        if kwargs.get("structured_output_model") is not None and not can_force(
            self.tool_parser, tool_specs, cast(Any, tool_choice)
        ):
            # As Strands does for models that cannot force a call: only the chosen tool; without a choice, all tools.
            name = cast(Any, tool_choice or {}).get("tool", {}).get("name")
            tool_specs = [spec for spec in tool_specs or () if spec["name"] == name] or tool_specs
        state, invocation = kwargs.get("model_state"), kwargs.get("invocation_state")
        origin = self._episodes.of_call(state, invocation)
        if self._sessions is not None:
            await to_thread.run_sync(self._sessions.begin, origin.trajectory, state, messages)
        # Built from the current state: `update_config` and `reset` during the request affect the next call.
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
            # Strands checks its signal when an event arrives, so it needs one; it reads no further.
            yield {"messageStart": {"role": "assistant"}}
            yield {"messageStop": {"stopReason": "cancelled"}}
            return
        parsed, blocks = call.record(generation)
        origin.note(call.turn)
        if self._sessions is not None:
            self._sessions.note(origin.trajectory, state)
        keep_written_names(state, {call.id: call.name for call in parsed.tool_calls if not is_tool_name(call.name)})
        for event in stream_events(blocks, stop_reason(generation, parsed), generation):
            yield event
            _observe_cancellation(invocation, cancel_signal)

    @override
    async def structured_output(
        self, output_model: type[T], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Sample an instance of a Pydantic model, constrained by its JSON schema.

        The tokens are recorded in a sequence of their own with loss mask 0: a grammar constrains them, so they are
        off-policy. `trajectory.sequences(auxiliary=True)` includes the sequence.

        Args:
            output_model: The Pydantic model to sample.
            prompt: The conversation.
            system_prompt: The system prompt.
            **kwargs: A `cancel_signal`, as for `stream`; other arguments are ignored.

        Yields:
            `{"output": <instance of output_model>}`.

        Raises:
            ValueError: The sampled text is not valid for `output_model`, for example because it was cut off.
            SGLangCancelledError: The signal was set.
            SGLangClientError: As for `stream`.
        """
        call = self._call(
            prompt,
            None,
            system_text(system_prompt, None),
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
                f"the sampled text is not a valid {output_model.__name__} (finish reason {generation.finish_type}): "
                f"{error}"
            ) from error
        yield {"output": output}

    def _call(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None,
        system: str | None,
        trajectory: Trajectory,
        *,
        caller: Caller = OUTSIDE,
        names: Mapping[str, str] | None = None,
        cancel_signal: threading.Event | None = None,
        json_schema: str | None = None,
    ) -> ModelCall:
        """Create a call with the model's current configuration; the arguments are those of `ModelCall`."""
        with _configuring:
            settings = self._settings  # first: it may bring another template and parser
            template, parser, images = self.chat_template, self.tool_parser, self.images
        parts = {"system prompt": system, "tools": tool_specs or None, **template.identity}
        chat = ChatRequest(messages, tool_specs, system, trajectory.fingerprint(parts, messages, caller.agent))
        return ModelCall(
            chat,
            trajectory,
            self.client,
            template,
            parser,
            images,
            settings,
            self.on_request,
            caller=caller,
            names=names or {},
            cancel_signal=cancel_signal,
            json_schema=json_schema,
        )


def _observe_cancellation(invocation_state: Any, cancel_signal: threading.Event | None) -> None:
    """Apply a cancel signal of the agent's caller now.

    Strands copies that signal to the agent's own, `cancel_signal`, in a task that polls every 50 ms, and a complete
    answer is streamed in less. Graphs share an invocation state, so its agent may be a different one.

    Args:
        invocation_state: Strands' argument of that name.
        cancel_signal: Strands' argument of that name.
    """
    agent = invocation_state.get("agent") if isinstance(invocation_state, dict) else None
    observe = getattr(agent, "_observe_cancellation", None)
    if cancel_signal is not None and observe is not None and getattr(agent, "cancel_signal", None) is cancel_signal:
        observe()


class AuxiliaryModel(Model):
    """A view of a model whose every call is auxiliary; server, configuration and trajectory are shared.

    Strands does not tell a provider what a call is for, so a judge looks like an agent that is trained. The code that
    creates the agent knows, and passes this model. That works in every thread, event loop and context, and for helpers
    that Strands creates from `Agent(aux_model=...)`.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Model) -> None:
        """Wrap a model whose `stream` accepts `auxiliary=True`."""
        self.model = model

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, such as its tokenizer, client or trajectory."""
        if name == "model":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def auxiliary(self) -> AuxiliaryModel:
        """This view itself."""
        return self

    @property
    def _supports_structured_output(self) -> bool:  # type: ignore[override]
        return self.model._supports_structured_output

    @property
    @override
    def stateful(self) -> bool:
        """The model's `stateful`."""
        return self.model.stateful

    @property
    @override
    def context_window_limit(self) -> int | None:
        """The model's `context_window_limit`."""
        return self.model.context_window_limit

    @override
    async def count_tokens(self, *args: Any, **kwargs: Any) -> int:
        """Call the model's `count_tokens`."""
        return await self.model.count_tokens(*args, **kwargs)

    @override
    def update_config(self, **model_config: Any) -> None:
        """Change the configuration of the model itself."""
        self.model.update_config(**model_config)

    @override
    def get_config(self) -> Any:
        """Return the model's current configuration."""
        return self.model.get_config()

    @override
    def stream(self, *args: Any, **kwargs: Any) -> AsyncIterable[StreamEvent]:
        """Call the model's `stream` with `auxiliary=True`."""
        return self.model.stream(*args, **{**kwargs, "auxiliary": True})

    @override
    def structured_output(
        self, output_model: type[T], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Call the model's `structured_output`, which is always auxiliary."""
        return self.model.structured_output(output_model, prompt, system_prompt, **kwargs)
