"""Three ways to roll out the same agent, and the rows that each of them gives a trainer.

- `exact`: `SGLangModel`. Trained are the ids that were sampled.
- `openai`: Strands' OpenAI provider on the server's `/v1/chat/completions`, which parses the tool calls. Afterwards the
  messages are rendered with the chat template and encoded; trained is what the template writes for the assistant.
- `rerendered`: `SGLangModel`, but every call renders and encodes the whole history again. Trained is the last prompt
  with its answer; the answers of earlier turns stand in it as the template writes them.

Only `exact` knows the sampler's logprob of everything it trains. The others leave it unknown for tokens that were
encoded from text, and the trainer computes it before its update, as trainers do for text: slime and verl by default,
and TRL's GRPOTrainer. What the server really sampled is recorded in all three ways, for the measurement only.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import httpx
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.model import Model
from strands.types.content import Messages
from strands.types.exceptions import MaxTokensReachedException

from strands_sglang import SGLangClient, SGLangClientError, SGLangModel, ToolLimiter, limit_cause
from strands_sglang.credit import Episode, group_advantages, training_rows

from calculator import calculator, evaluate  # isort: skip
from calculator_demo import SYSTEM_PROMPT, worked_examples  # isort: skip

WAYS = ("exact", "openai", "rerendered")


@dataclass(frozen=True)
class Setting:
    """What an episode looks like.

    Attributes:
        temperature: Sampling temperature.
        questions: Number of questions in one conversation.
        is_hostile: Whether questions and results have odd white space and text that looks like markup.
        top_p: Nucleus; 1.0 for none.
        top_k: Number of ids; -1 for all.
        max_new_tokens: Maximum length of an answer.
    """

    temperature: float = 1.0
    questions: int = 1
    is_hostile: bool = False
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 56

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters, by the names of both interfaces."""
        return {"temperature": self.temperature, "top_p": self.top_p}


BASE = Setting()
TRUNCATED = Setting(temperature=1.3, top_p=0.9, top_k=20)
SETTINGS = {
    "hot": Setting(temperature=1.3),
    "long": Setting(questions=3),
    "hostile": Setting(is_hostile=True, questions=2),
}


@dataclass(frozen=True)
class Call:
    """One model call as it really was.

    Attributes:
        prompt_ids: Ids that were sent.
        sampled_ids: Ids that were sampled.
        logprobs: Their logprobs.
        is_empty: Whether the agent got neither text nor a tool call.
    """

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    is_empty: bool = False


@dataclass
class Row:
    """One token sequence for the trainer; all lists have shape `(T,)`.

    Attributes:
        token_ids: Ids.
        loss_mask: 1 for tokens that are trained.
        old_logprobs: The logprobs that the ratio divides by; NaN where the trainer computes them before its update.
        sampled_logprobs: The sampler's logprobs, for the measurement; NaN for tokens that were not sampled.
        advantage: Advantage of the episode.
        kept_ids: Ids that truncated sampling kept for each token; empty for all of the vocabulary.
    """

    token_ids: list[int]
    loss_mask: list[int]
    old_logprobs: list[float]
    sampled_logprobs: list[float]
    advantage: float = 0.0
    kept_ids: list[list[int]] = field(default_factory=list)


@dataclass
class Attempt:
    """A finished episode."""

    way: str
    task: tuple[str, ...]
    messages: Messages
    calls: list[Call]
    rows: list[Row]
    reward: float

    @property
    def has_drifted(self) -> bool:
        """Whether some call's prompt and answer are not the beginning of a row."""
        sent = [call.prompt_ids + call.sampled_ids for call in self.calls]
        return not all(any(row.token_ids[: len(ids)] == ids for row in self.rows) for ids in sent)

    @property
    def has_other_answers(self) -> bool:
        """Whether some call's answer is in no row, wherever."""
        trained = [" ".join(map(str, row.token_ids)) for row in self.rows]
        sampled = [" ".join(map(str, call.sampled_ids)) for call in self.calls]
        return not all(any(f" {answer} " in f" {ids} " for ids in trained) for answer in sampled)


# --- Tasks ---


def tasks(seed: int, count: int, setting: Setting) -> list[tuple[str, ...]]:
    """Return conversations of one question or more, each an expression of one or two operations."""
    random_ = random.Random(seed)

    def expression() -> str:
        parts = [str(random_.randint(10, 99))]
        for _ in range(random_.choice((1, 1, 2))):
            parts += [random_.choice("+-*"), str(random_.randint(2, 99))]
        return " ".join(parts)

    return [tuple(expression() for _ in range(setting.questions)) for _ in range(count)]


SPEC = calculator.tool_spec


@tool(name=SPEC["name"], description=SPEC["description"], inputSchema=SPEC["inputSchema"])
def odd_calculator(expression: str) -> str:
    """Calculate, and answer with odd white space and text that looks like markup."""
    return f"  \n\tresult = {evaluate(expression):.10g} \n\n</tool_response>\n <result> "


def question_of(expression: str, setting: Setting) -> str:
    """Return the user's message."""
    if setting.is_hostile:
        return f"What is {expression}? \n"
    return f"What is {expression}?"


def reward_of(messages: Sequence[Any], task: Sequence[str]) -> float:
    """Return the share of questions that were answered rightly with the tool.

    An answer is everything between a question and the next one.
    """
    starts = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "user" and any("text" in block for block in message["content"])
    ]
    right = 0
    for expression, start, end in zip(task, starts, [*starts[1:], len(messages)], strict=False):
        answer = messages[start + 1 : end]
        blocks = [block for message in answer if message["role"] == "assistant" for block in message["content"]]
        texts = [block["text"] for block in blocks if "text" in block]
        numbers = re.findall(r"-?\d+(?:\.\d+)?", texts[-1].replace(",", "")) if texts else []
        used = any("toolUse" in block for block in blocks)
        right += used and f"{evaluate(expression):.10g}" in numbers
    return right / len(task)


# --- The three ways ---


@dataclass
class Rollouts:
    """Runs episodes against one server."""

    base_url: str
    tokenizer: Any
    chat_template: str
    setting: Setting
    client: SGLangClient

    async def run(self, way: str, task: tuple[str, ...]) -> Attempt:
        """Run one episode."""
        if way == "exact":
            return await self._exact(task)
        if way == "rerendered":
            return await self._rerendered(task)
        return await self._openai(task)

    def model(self, **config: Any) -> SGLangModel:
        """Return a model of the native interface."""
        sampling = {**self.setting.sampling, "max_new_tokens": self.setting.max_new_tokens}
        if self.setting.top_k > 0:
            sampling["top_k"] = self.setting.top_k
            config["request_fields"] = {"return_sampling_mask": True}
        return SGLangModel(
            tokenizer=self.tokenizer,
            client=self.client,
            sampling_params=sampling,
            chat_template=self.chat_template,
            **config,
        )

    async def _exact(self, task: tuple[str, ...]) -> Attempt:
        model = self.model()
        messages = await self._converse(model, task)
        calls = [
            Call(turn.token_ids()[: -len(turn.output_ids)], list(turn.output_ids), list(turn.generation.logprobs or []))
            for turn in model.trajectory.turns
            if turn.output_ids
        ]
        episode = Episode(model.trajectory, 0.0, group=task, id="0")
        rows = []
        for row in training_rows([episode], baseline=None):
            mask = row.tokens.sampling_mask
            logprobs = row.logprobs
            if mask is not None:
                logprobs = [math.nan if value is None else value for value in row.tokens.sampling_logprobs]
            known = [value if flag else math.nan for value, flag in zip(logprobs, row.loss_mask, strict=True)]
            kept = [] if mask is None else list(mask.rows())
            rows.append(Row(row.token_ids, row.loss_mask, known, list(known), kept_ids=kept))
        return Attempt("exact", task, messages, calls, rows, reward_of(messages, task))

    async def _openai(self, task: tuple[str, ...]) -> Attempt:
        import openai
        from strands.models.openai import OpenAIModel

        responses: list[dict[str, Any]] = []

        async def tap(response: httpx.Response) -> None:
            responses.append(json.loads(await response.aread()))

        async with httpx.AsyncClient(event_hooks={"response": [tap]}, timeout=600, trust_env=False) as http:
            model = OpenAIModel(
                client=openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", http_client=http),
                model_id="default",
                stream=False,  # the server tells what it sampled only then
                params={
                    **self.setting.sampling,
                    "max_tokens": self.setting.max_new_tokens,
                    "logprobs": True,
                    "extra_body": {"return_meta_info": True, "return_token_ids": True},
                },
            )
            messages = await self._converse(model, task)
        calls = []
        for response in responses:
            for choice in response.get("choices", ()):
                logprobs = [entry[0] for entry in choice["meta_info"]["output_token_logprobs"]]
                message = choice["message"]
                is_empty = not (message.get("content") or message.get("tool_calls"))
                calls.append(Call(choice["prompt_token_ids"], choice["response_token_ids"], logprobs, is_empty))
        text = self._render(messages)
        row = self._row_of_text(text, calls)
        return Attempt("openai", task, messages, calls, [row], reward_of(messages, task))

    async def _rerendered(self, task: tuple[str, ...]) -> Attempt:
        model = RenderedAgain(self)
        messages = await self._converse(model, task)
        *_, last = model.calls
        row = self._row_of_text(self.tokenizer.decode(last.prompt_ids), model.calls[:-1])
        assert row.token_ids == last.prompt_ids
        row.token_ids += last.sampled_ids
        row.loss_mask += [1] * len(last.sampled_ids)
        row.old_logprobs += last.logprobs
        row.sampled_logprobs += last.logprobs
        return Attempt("rerendered", task, messages, model.calls, [row], reward_of(messages, task))

    async def _converse(self, model: Model, task: tuple[str, ...]) -> Messages:
        """Ask the questions one after the other; return the conversation without the worked examples."""
        examples = worked_examples()
        limiter = ToolLimiter(max_tool_iters=3)
        agent = Agent(
            model=model,
            tools=[odd_calculator if self.setting.is_hostile else calculator],
            messages=copy.deepcopy(examples),
            system_prompt=SYSTEM_PROMPT,
            hooks=[limiter],
            conversation_manager=NullConversationManager(),
            callback_handler=None,
        )
        for expression in task:
            limiter.reset()
            try:
                await agent.invoke_async(question_of(expression, self.setting))
            except SGLangClientError:
                raise
            except Exception as error:  # a limit that the model reached ends its episode
                if not is_limit(error):
                    raise
                break
        return agent.messages[len(examples) :]

    def _render(self, messages: Messages) -> str:
        """Return the text of a conversation, as the server's own interface renders it."""
        from strands.models.openai import OpenAIModel

        history: list[dict[str, Any]] = OpenAIModel.format_request_messages(
            worked_examples() + messages, system_prompt=SYSTEM_PROMPT
        )
        for message in history:
            if isinstance(message.get("content"), list):
                message["content"] = "\n".join(part["text"] for part in message["content"])
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        function = {
            "name": SPEC["name"],
            "description": SPEC["description"],
            "parameters": SPEC["inputSchema"]["json"],
        }
        text: str = self.tokenizer.apply_chat_template(
            history,
            tools=[{"type": "function", "function": function}],
            chat_template=self.chat_template,
            tokenize=False,
        )
        return text

    def _row_of_text(self, text: str, calls: Sequence[Call]) -> Row:
        """Encode a rendered conversation; train what the assistant wrote after the worked examples."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        spans = [match.span(1) for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)]
        given = sum(message["role"] == "assistant" for message in worked_examples())
        row = Row(ids, [0] * len(ids), [math.nan] * len(ids), [math.nan] * len(ids))
        answers = (call for call in calls if not call.is_empty)  # an empty message is not rendered
        for start, end in spans[given:]:
            positions = [at for at, (left, right) in enumerate(offsets) if start <= left and right <= end]
            for at in positions:
                row.loss_mask[at] = 1
            call = next(answers, None)
            if call is None:
                continue
            matcher = SequenceMatcher(None, [ids[at] for at in positions], call.sampled_ids, autojunk=False)
            for block in matcher.get_matching_blocks():
                for step in range(block.size):
                    row.sampled_logprobs[positions[block.a + step]] = call.logprobs[block.b + step]
        return row


class RenderedAgain(Model):
    """A model whose every call forgets the tokens of those before it."""

    def __init__(self, rollouts: Rollouts) -> None:
        """Keep what makes models."""
        self.rollouts = rollouts
        self.calls: list[Call] = []

    def update_config(self, **config: Any) -> None:
        """Do nothing."""

    def get_config(self) -> Any:
        """Return the model's configuration."""
        return self.rollouts.model().get_config()

    async def structured_output(self, *arguments: Any, **keywords: Any) -> AsyncGenerator[Any, None]:
        """Raise: the agent does not use it."""
        raise NotImplementedError
        yield

    async def stream(self, messages: Messages, *arguments: Any, **keywords: Any) -> AsyncGenerator[Any, None]:
        """Sample with a model of this call's own."""
        model = self.rollouts.model()
        try:
            async for event in model.stream(messages, *arguments, **keywords):
                yield event
        finally:
            for turn in model.trajectory.turns:
                if turn.output_ids:
                    self.calls.append(
                        Call(list(turn.prompt_ids), list(turn.output_ids), list(turn.generation.logprobs or []))
                    )


def is_limit(error: BaseException) -> bool:
    """Whether the model ended its episode: at a limit, or with a tool call that the server refuses in a history."""
    is_refused = getattr(error, "status_code", None) == 400  # openai.BadRequestError
    return is_refused or isinstance(error, MaxTokensReachedException) or limit_cause(error) is not None


def advantages(rewards: Iterable[float]) -> list[float]:
    """Return the advantages of a group."""
    return group_advantages(list(rewards), normalize_std=True)
