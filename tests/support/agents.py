"""Parts of test episodes: agents, tools that note what ran, models, tokenizers, a clock."""

import asyncio
import functools
import gc
import importlib.util
import inspect
import json
import time
from contextlib import contextmanager

import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models import Model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from strands_sglang import SGLangModel
from strands_sglang.tool_parsers import ToolParser, ToolParseResult


def call(name="calculator", **arguments):
    """A tool call as a model writes it in Hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_tools():
    """A calculator and a tool that always fails, and the list in which they note what was run."""
    ran = []

    @tool
    def calculator(expression: str) -> str:
        """Compute a product.

        Args:
            expression: Such as "2 * 3".
        """
        ran.append(expression)
        left, right = expression.split("*")
        return str(int(left) * int(right))

    @tool
    def broken(reason: str) -> str:
        """Fail.

        Args:
            reason: Why.
        """
        ran.append(reason)
        raise RuntimeError(reason)

    return [calculator, broken], ran


def raise_once(agent, event_type):
    """Make the agent's hooks raise `ZeroDivisionError` at the first event of a kind."""
    raised = []

    def raise_at_first(event):
        if not raised:
            raised.append(event)
            raise ZeroDivisionError("in a hook")

    agent.add_hook(raise_at_first, event_type)


def _hooks_of(model):
    """The hooks of a model, or of the models of a view or a router."""
    models = [getattr(one, "model", one) for one in getattr(model, "models", [model])]
    return [one.hooks for one in models if isinstance(one, SGLangModel)]


# Whether agents get their model's hooks; a fixture sets it.
LISTENING = False


def make_agent(model, tools=None, **kwargs):
    """An agent without printing, without history management and without hidden retries."""
    if LISTENING:
        kwargs["hooks"] = [*kwargs.get("hooks", ()), *_hooks_of(model)]
    defaults = {
        "system_prompt": "Be brief.",
        "callback_handler": None,
        "conversation_manager": NullConversationManager(),
        "retry_strategy": None,
    }
    return Agent(model=model, tools=tools or [], **{**defaults, **kwargs})


async def ask(agent, *questions):
    """Ask an agent one question after the other; a number asks that many numbered ones."""
    if isinstance(questions[0], int):
        questions = [f"Question-{i}?" for i in range(questions[0])]
    for question in questions:
        await agent.invoke_async(question)


class EveryAnswerCallsATool(ToolParser):
    """Parses the first answers as tool calls, so that a model that cannot call tools drives a tool loop."""

    def __init__(self, turns):
        """Parse this many answers as calls."""
        super().__init__()
        self.turns = turns

    def parse(self, text):
        """Return one call of the calculator, until enough were made."""
        self.turns -= 1
        if self.turns < 0:
            return []
        return [ToolParseResult(id=f"call_{self.turns}", name="calculator", input={"expression": f"{self.turns} * 7"})]


def tool_use(identifier, name="echo", **arguments):
    """One tool call of a scripted answer."""
    return {"toolUseId": identifier, "name": name, "input": arguments}


class ScriptedModel(Model):
    """Answers the calls of an agent one after the other.

    Attributes:
        answers: The remaining answers: a text, a list of tool calls, or an exception to raise.
        calls: The messages of every call so far.
    """

    def __init__(self, answers):
        self.answers = list(answers)
        self.calls = []

    def update_config(self, **model_config):
        pass

    def get_config(self):
        return {}

    def structured_output(self, *args, **kwargs):
        raise NotImplementedError

    async def stream(self, messages, *args, **kwargs):
        self.calls.append(messages)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield {"messageStart": {"role": "assistant"}}
        if isinstance(answer, str):
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": answer}}}
            yield {"contentBlockStop": {}}
        else:
            for use in answer:
                start = {"toolUseId": use["toolUseId"], "name": use["name"]}
                yield {"contentBlockStart": {"start": {"toolUse": start}}}
                yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(use["input"])}}}}
                yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(answer, str) else "tool_use"}}
        yield {
            "metadata": {
                "usage": {"inputTokens": 1, "outputTokens": 1, "totalTokens": 2},
                "metrics": {"latencyMs": 1},
            }
        }


SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# In Qwen3's vocabulary these are single tokens, but not special ones: decoding keeps them.
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")

_SENTENCES = (
    "You are a helpful assistant. Answer the question of the user in one short sentence.",
    "The quick brown fox jumps over the lazy dog while the other animals are watching.",
    "What is 17 times 23? Please use the calculator tool and tell me the result.",
    "Let me think about this step by step before I answer. First, I need to call the calculator.",
    'You may call one or more tools. {"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}',
    '{"type": "function", "function": {"name": "search", "description": "Search the web for a query", "parameters": '
    '{"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}',
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))",
    "The weather in Paris is sunny today, with 21 degrees and a light wind from the west.",
    "system\nuser\nassistant\ntool\n\n# Tools\n\n",
    "The result of the calculation is 391. The answer is 42. There was an error: unknown tool, invalid JSON.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va très bien, señor. 日本語 中文 🙂",
)

CHATML_TEMPLATE = """\
{%- set system_text = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- system_text + '\\n\\n' if system_text else '' }}
    {{- '# Tools\\n\\nThese functions can be called, as often as needed:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nWrite each call as a JSON object between two marks:\\n<tool_call>\\n' }}
    {{- '{"name": "the function", "arguments": {"the": "arguments"}}\\n</tool_call><|im_end|>\\n' }}
{%- elif system_text %}
    {{- '<|im_start|>system\\n' + system_text + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last_question=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set state.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > state.last_question and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}
"""


@functools.cache
def build_chatml_tokenizer(*, with_marks=True):
    """A ChatML tokenizer with about 1,500 tokens; built once per process and shared, so don't change it.

    Args:
        with_marks: Whether `<tool_call>`, `<think>` and so on are tokens of their own. Without, they are ordinary text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500 - len(MARKS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Numbers give the merges that separate "12" and "123"; without repetition BPE finds nothing worth merging.
    numbers = [" ".join(str(n * step) for n in range(1, 200)) for step in (1, 7, 13, 101)]
    tokenizer.train_from_iterator([*_SENTENCES, *numbers] * 2, trainer)
    if with_marks:
        tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML_TEMPLATE
    return fast


class LetterTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python with a token per ASCII character. Like most of them, it raises for ids that it lacks."""

    def __init__(self):
        self.letters = ["<|im_start|>", "<|im_end|>", "\n", *map(chr, range(32, 127))]
        super().__init__(
            eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=False
        )
        self.chat_template = CHATML_TEMPLATE

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {letter: token_id for token_id, letter in enumerate(self.letters)}

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token if token in self.letters else "?")

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


class Gate:
    """An answer that waits for its release, and signals when a request has reached it.

    `on_abort` is what was sampled until an abort.
    """

    def __init__(self, on_abort=None):
        self.reached = asyncio.Event()
        self.open = asyncio.Event()
        self.on_abort = on_abort

    async def __call__(self, request):
        self.reached.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            if self.on_abort is None:
                raise
            return self.on_abort
        return "let go"


def user(*blocks):
    """A message of Strands; a block that is a string is a text."""
    return {"role": "user", "content": [{"text": block} if isinstance(block, str) else block for block in blocks]}


def assistant(*blocks):
    return {"role": "assistant", "content": [{"text": block} if isinstance(block, str) else block for block in blocks]}


def numbered(request):
    """An answer that differs from every other one."""
    return f"Answer-{request.index}."


def statuses(trajectory):
    """The status of each turn."""
    return [turn.status.value for turn in trajectory.turns]


def response_masks(trajectory):
    """The loss mask of each sampled segment, by sequence."""
    sequences = trajectory.sequences()
    return [[segment.loss_mask for segment in one.segments if segment.is_response] for one in sequences]


def advance(seconds):
    """Advance the running loop's clock: every timer that ends within this time is due at once."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds


@contextmanager
def idle_for(cpu_s):
    """Fail if the block takes more CPU time of this thread, apart from collecting what other tests have left."""
    gc.disable()
    try:
        began = time.thread_time()
        yield
        used = time.thread_time() - began
    finally:
        gc.enable()
    assert used < cpu_s, f"{used:.2f} s of CPU time"


def needs_module(name):
    """Skip a test if this version of Strands lacks a module."""
    return pytest.mark.skipif(not has_module(name), reason=f"this version of strands-agents has no {name}")


def needs_argument(method, argument):
    """Skip a test if a method of `Agent` lacks an argument in this version of Strands."""
    taken = argument in inspect.signature(getattr(Agent, method)).parameters
    return pytest.mark.skipif(not taken, reason=f"Agent.{method} of this version of strands-agents takes no {argument}")


def has_module(name):
    """Whether Strands has a module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
