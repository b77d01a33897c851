"""What a server says of itself, asked once: its context length, and whether its tokenizer is the model's.

A tokenizer that is not the served model's gives plausible text and worthless training data, so it is an error at the
first call, before anything is sampled. Behind a router, which has no `/tokenize`, the match stays unproven and a log
line says so.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .chat_template import ChatTemplate
from .client import SGLangClient
from .exceptions import TokenizerMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_PROBE = "Tokens: naïve 日本語 🙂 12345 \t\n  def f(x):\n    return x"

_PROBED_MARKS = 256  # some vocabularies hold a thousand reserved tokens


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself.

    Attributes:
        context_length: Longest prompt plus answer, in tokens; None if the server does not tell.
        tokenizer_proven: Whether its tokenizer was seen to be the model's.
    """

    context_length: int | None
    tokenizer_proven: bool


_Key = tuple[asyncio.AbstractEventLoop, int]
_facts: weakref.WeakKeyDictionary[SGLangClient, weakref.WeakKeyDictionary[PreTrainedTokenizerBase, ServerFacts]]
_facts = weakref.WeakKeyDictionary()
_checks: weakref.WeakKeyDictionary[SGLangClient, dict[_Key, asyncio.Task[ServerFacts]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


async def check_server(client: SGLangClient, template: ChatTemplate) -> ServerFacts:
    """What the client's server says of itself. Success is kept per client and tokenizer; a failure never is.

    Calls that come while a check is running share it, so a thousand agents that start together ask once.

    Raises:
        TokenizerMismatchError: The server's tokenizer gives other ids.
        SGLangClientError: The server cannot be reached.
    """
    with _lock:
        known = _facts.get(client, {}).get(template.tokenizer)
        if known is not None:
            return known
        key = (asyncio.get_running_loop(), id(template.tokenizer))
        checks = _checks.setdefault(client, {})
        if key not in checks:
            checks[key] = asyncio.ensure_future(_check(client, template))
            checks[key].add_done_callback(functools.partial(_forget, checks, key))
        check = checks[key]
    return await asyncio.shield(check)


def _forget(checks: dict[_Key, asyncio.Task[ServerFacts]], key: _Key, task: asyncio.Task[ServerFacts]) -> None:
    checks.pop(key, None)
    if not task.cancelled():
        task.exception()  # looked at, so that a failure whose waiters were all cancelled is not reported as lost


async def _check(client: SGLangClient, template: ChatTemplate) -> ServerFacts:
    context_length = await client.context_length()
    if context_length is None:
        logger.warning(
            "base_url=<%s> | the server does not tell its context length: without max_new_tokens its default of 128 "
            "tokens holds; set max_new_tokens in sampling_params, or context_window_limit",
            client.base_url,
        )
    facts = ServerFacts(context_length, await _compare_tokenizers(client, template))
    with _lock:
        _facts.setdefault(client, weakref.WeakKeyDictionary())[template.tokenizer] = facts
    return facts


async def _compare_tokenizers(client: SGLangClient, template: ChatTemplate) -> bool:
    # Added tokens are what tokenizers of one family differ in: `<think>` is one token for Qwen3 and three for Qwen2.5.
    added = template.tokenizer.added_tokens_decoder.values()
    marks = " ".join(token.content for token in list(added)[:_PROBED_MARKS])
    text = _PROBE + marks + template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    served = await client.tokenize(text)
    if served is None:
        logger.warning(
            "base_url=<%s> | no usable /tokenize there, so the tokenizer's match is unproven", client.base_url
        )
        return False
    own = template.encode(text)
    if served == own:
        return True
    first = next((i for i, (a, b) in enumerate(zip(own, served, strict=False)) if a != b), min(len(own), len(served)))
    raise TokenizerMismatchError(
        f"the tokenizer {template.tokenizer.name_or_path!r} is not the one served at {client.base_url}: "
        f"{template.decode(own[first : first + 3])!r} is {own[first : first + 3]} here, and the server has "
        f"{served[first : first + 3]} there; load the tokenizer from the path that the server's /model_info names as "
        "tokenizer_path, and add no tokens to it"
    )
