"""Facts about a server, requested once: its context length, and whether its tokenizer is the model's.

The wrong tokenizer gives plausible text and worthless training data, so a mismatch is an error at the first call,
before anything is sampled. A router has no `/tokenize`; then the match stays unproven and a warning is logged.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from ..client.client import SGLangClient, shared
from ..exceptions import SGLangConnectionError, TokenizerMismatchError
from ..shown import first_difference
from ..templates.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

_PROBE = "Tokens: naïve 日本語 🙂 12345 \t\n  def f(x):\n    return x"

_PROBED_MARKS = 256  # some vocabularies hold a thousand reserved tokens


@dataclass(frozen=True)
class ServerFacts:
    """What a server, or all servers of one client together, report.

    Attributes:
        context_length: Maximum length of prompt and answer together, in tokens; None if the server does not report it.
        tokenizer_proven: Whether the server's tokenizer was compared with the model's and is the same.
    """

    context_length: int | None
    tokenizer_proven: bool


def known_facts(client: SGLangClient, template: ChatTemplate) -> ServerFacts | None:
    """Return the facts about the servers that get requests now; None if one of them was not asked yet.

    Of several servers the shortest context counts, and the tokenizer is proven if it is proven for all of them.
    """
    servers = client.servers
    proofs = [server.tokenizers.get(template.tokenizer) for server in servers]
    if None in proofs:
        return None
    known = (server for server in servers if server.context_length is not None)
    lengths = [(server.context_length or 0) - server.reserves_last_token for server in known]
    return ServerFacts(min(lengths, default=None), all(proofs))


async def check_server(client: SGLangClient, template: ChatTemplate) -> ServerFacts:
    """Ask the client's servers for their facts. Success is remembered per server and tokenizer; a failure never is.

    Concurrent calls share a running check, so a thousand agents that start together ask once. With several servers, one
    that cannot be reached is skipped, and asked when it gets requests again.

    Raises:
        TokenizerMismatchError: The server's tokenizer gives different ids.
        SGLangClientError: The server cannot be reached.
    """
    while (facts := known_facts(client, template)) is None:
        await shared(client, ("check", id(template.tokenizer)), partial(_check, client, template))
    return facts


async def _check(client: SGLangClient, template: ChatTemplate) -> None:
    """Ask all servers that get requests and were not asked yet.

    Raises:
        SGLangClientError: A tokenizer is not the model's, or no server could be asked.
    """
    servers = [server for server in client.servers if template.tokenizer not in server.tokenizers]
    checks = (_check_one(client, template, server.base_url) for server in servers)
    answers = await asyncio.gather(*checks, return_exceptions=True)
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, bool):
            server.tokenizers[template.tokenizer] = answer
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in errors:
        # A server that refuses connections is no longer available, unless all of them refuse.
        if not isinstance(error, SGLangConnectionError) or len(errors) == len(client.base_urls):
            raise error
    if errors and known_facts(client, template) is None:
        raise errors[0]  # the server answers other requests, but not these


async def _check_one(client: SGLangClient, template: ChatTemplate, base_url: str) -> bool:
    """Return whether the tokenizer is proven to be the server's."""
    context_length = await client.context_length(base_url)
    if context_length is None:
        logger.warning(
            "base_url=<%s> | the server does not report its context length: set max_new_tokens or max_context_tokens, "
            "since its default is 128 new tokens, and context_window_limit for context managers",
            base_url,
        )
    # Tokenizers of one family differ in their added tokens: `<think>` is one token for Qwen3 and three for Qwen2.5.
    added = template.tokenizer.added_tokens_decoder.values()
    marks = " ".join(token.content for token in list(added)[:_PROBED_MARKS])
    text = _PROBE + marks + template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    served = await client.tokenize(text, base_url)
    if served is None:
        logger.warning(
            "base_url=<%s> | the server has no usable /tokenize, so the tokenizer's match is unproven", base_url
        )
        return False
    encoded = template.encode(text)
    if served == encoded:
        return True
    first = first_difference(encoded, served)
    raise TokenizerMismatchError(
        f"the tokenizer {template.tokenizer.name_or_path!r} is not the one served at {base_url}: "
        f"{template.decode(encoded[first : first + 3])!r} is {encoded[first : first + 3]} here and "
        f"{served[first : first + 3]} there; load the tokenizer from the tokenizer_path in the server's /model_info, "
        "and add no tokens to it, or start the server with your own (--tokenizer-path)"
    )
