"""One request: what a client costs for a prompt of token ids, alone and among a thousand.

All requests of a round start at once, on connections that are open already, against the instant server, which answers
256 sampled tokens with logprobs once all are sent (after 0.2 to 1 s; a single request: at once). A one-off request has
a new prompt. A continuing one repeats the last prompt and answer and adds 64 tokens. Responses are dropped as they
come. `here` asks as `SGLangModel` does: prompts that are encoded once, logprobs as one flat list (`flat_logprobs`).
`floor` is asyncio on a socket: headers written once, orjson for the body and the response, and no checks, retries or
aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import random
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

from harness import Goal
from worker import cost_of

OURS = {"here": "ours"}
OTHERS = {"0.4.3": "published", "aiohttp": "bare_aiohttp", "httpx": "stock_httpx", "floor": "floor"}

VOCABULARY = 150_000
OUTPUT_TOKENS = 256
ANSWER = random.Random(0).choices(range(VOCABULARY), k=OUTPUT_TOKENS)
NEW_TOKENS = 64
ALONE = 20
"""Requests of a round one after the other, where only one is in flight."""

Ask = Callable[[Any], Awaitable[None]]


COMPARED = ("0.4.3", "floor")
METRICS = {
    "cpu_ms": "CPU ms per request",
    "stall_cpu_ms": "Largest stall of the loop, CPU ms",
    "stall_ms": "Largest stall of the loop, ms",
}
COLUMNS = ("prompt ids", "in flight", "turn")


GOALS = [
    Goal("cpu_ms", {"prompt ids": 1_000, "in flight": 512, "turn": "one-off"}, 0.85, "0.4.3"),
    Goal("cpu_ms", {"prompt ids": 32_000, "in flight": 512, "turn": "one-off"}, 1.5, "floor"),
    Goal("cpu_ms", {"prompt ids": 32_000, "in flight": 512, "turn": "continuing"}, 1.0, "floor"),
    Goal("stall_ms", {"in flight": 1_000, "turn": "one-off"}, 0.5, "0.4.3"),
    Goal("stall_ms", {"in flight": 1_000, "turn": "one-off", "prompt ids": 1_000}, 60),
    Goal("stall_ms", {"in flight": 1_000, "turn": "one-off", "prompt ids": 32_000}, 150),
]


def cases(size: str) -> list[dict[str, Any]]:
    """Return the cases of a size: `check` for the tests, `quick` or `full`."""
    if size == "quick":
        listed = [
            *[(prompt, 512, turn) for prompt in (1_000, 32_000) for turn in ("one-off", "continuing")],
            (1_000, 1, "one-off"),
            (1_000, 1_000, "one-off"),
        ]
    else:
        prompts = (1_000, 8_000, 32_000) if size == "full" else (1_000,)
        flights = (1, 64, 512, 1_000) if size == "full" else (1, 8)
        listed = list(itertools.product(prompts, flights, ("one-off", "continuing")))
    return [{"prompt ids": prompt, "in flight": flight, "turn": turn} for prompt, flight, turn in listed]


def setting(case: dict[str, Any]) -> dict[str, Any]:
    """Return what workers need besides the case."""
    flight = case["in flight"]
    delay_s = max(0.2, flight / 1000) if flight > 1 else 0.0  # all are sent before the first is answered
    return {"server": {"text": " token" * OUTPUT_TOKENS, "output_ids": ANSWER, "delay_s": delay_s}}


def is_left_out(case: dict[str, Any], contender: str) -> bool:
    """Stock httpx takes 15 ms for what others take 0.5: beyond 512 small prompts it would take the most time of all."""
    return contender == "httpx" and case["in flight"] * case["prompt ids"] > 600_000


def extended(prompt: list[int], ids: list[int]) -> list[int]:
    """Return a prompt with the ids of a turn."""
    prompt.extend(ids)
    return prompt


async def rounds_of(case: dict[str, Any], ask: Ask, start: Any = list, grow: Any = extended) -> Any:
    """Return the round: as many requests at once as the case says, or `ALONE` one after the other.

    Args:
        case: What to measure.
        ask: Sends a prompt, and drops the response.
        start: Makes a contender's own form of a prompt from ids.
        grow: Returns a prompt of that form with more ids.
    """
    rng, flight = random.Random(1), case["in flight"]
    is_one_off, count = case["turn"] == "one-off", ALONE if flight == 1 else flight
    prompts = [start(random_ids(rng, case["prompt ids"])) for _ in range(flight)]

    async def turn(place: int, ids: list[int]) -> None:
        if not is_one_off:
            prompts[place] = grow(prompts[place], ids)
        await ask(ids if is_one_off else prompts[place])

    async def one_by_one(new: list[list[int]]) -> None:
        for ids in new:
            await turn(0, ids)

    async def round_() -> dict[str, float]:
        await asyncio.gather(*(ask([1]) for _ in prompts))  # opens the connections that have closed meanwhile
        if is_one_off:
            new = [random_ids(rng, case["prompt ids"]) for _ in range(count)]
        else:
            new = [ANSWER + random_ids(rng, NEW_TOKENS) for _ in range(count)]
        if flight == 1:
            return await cost_of(lambda: one_by_one(new), count)
        return await cost_of(lambda: asyncio.gather(*map(turn, range(count), new)), count)

    await asyncio.gather(*map(ask, prompts))
    return round_


POOL = array("i", random.Random(2).choices(range(VOCABULARY), k=200_000))


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Return token ids of the vocabulary; drawing each would take longer than the requests."""
    start = rng.randrange(len(POOL) - count)
    return POOL[start : start + count].tolist()  # no two prompts share their int objects, as real ones do not


FIELDS = {"sampling_params": {"max_new_tokens": OUTPUT_TOKENS}, "return_logprob": True}


@contextlib.asynccontextmanager
async def ours(case: dict[str, Any]):
    from strands_sglang import SGLangClient

    kept: Any = ()
    with contextlib.suppress(ImportError):  # an older commit encodes every prompt as a whole
        from strands_sglang.protocol.wire import EncodedIds

        kept = EncodedIds.encode, EncodedIds.plus  # what a trajectory keeps of a prompt

    accepted = inspect.signature(SGLangClient.generate).parameters
    options = {"flat_logprobs": True} if "flat_logprobs" in accepted else {}  # as a model asks

    async def ask(prompt: Any) -> None:
        await client.generate(prompt, **options, **FIELDS)

    async with SGLangClient(case["base_url"]) as client:
        yield await rounds_of(case, ask, *kept)


@contextlib.asynccontextmanager
async def published(case: dict[str, Any]):
    from strands_sglang import SGLangClient

    async def ask(prompt: list[int]) -> None:
        await client.generate(prompt, **FIELDS)

    async with SGLangClient(case["base_url"]) as client:
        yield await rounds_of(case, ask)


@contextlib.asynccontextmanager
async def bare_aiohttp(case: dict[str, Any]):
    import aiohttp
    import orjson

    async def ask(prompt: list[int]) -> None:
        async with session.post(url, data=body_of(prompt)) as response:
            orjson.loads(await response.read())

    url = case["base_url"] + "/generate"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1000)) as session:
        yield await rounds_of(case, ask)


def body_of(prompt: list[int]) -> bytes:
    """Return the body of a request, as bare clients write it."""
    import orjson

    return orjson.dumps({"input_ids": prompt} | FIELDS)


@contextlib.asynccontextmanager
async def stock_httpx(case: dict[str, Any]):
    import httpx

    async def ask(prompt: list[int]) -> None:
        (await client.post("/generate", json={"input_ids": prompt} | FIELDS)).json()

    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx.AsyncClient(base_url=case["base_url"], limits=limits, timeout=None, trust_env=False) as client:
        yield await rounds_of(case, ask)


class Socket(asyncio.Protocol):
    """A connection of the floor."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.parts, self.missing = transport, [], 0

    def request(self, head: bytes, body: bytes) -> asyncio.Future[bytes]:
        self.transport.writelines([head % len(body), body])
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        return self.answer

    def data_received(self, data: bytes) -> None:
        if not self.missing:
            head, _, data = data.partition(b"\r\n\r\n")
            self.missing = int(head.rpartition(b"content-length: ")[2])
        self.parts.append(data)
        self.missing -= len(data)
        if not self.missing:
            body, self.parts = b"".join(self.parts), []
            self.answer.set_result(body)


@contextlib.asynccontextmanager
async def floor(case: dict[str, Any]):
    import orjson

    host, port = case["base_url"].removeprefix("http://").split(":")
    head = b"POST /generate HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\ncontent-length: %%d\r\n\r\n"
    head %= host.encode()
    idle: list[Socket] = []

    async def ask(prompt: list[int]) -> None:
        if not idle:
            idle.append((await asyncio.get_running_loop().create_connection(Socket, host, int(port)))[1])
        connection = idle.pop()
        orjson.loads(await connection.request(head, body_of(prompt)))
        idle.append(connection)

    try:
        yield await rounds_of(case, ask)
    finally:
        for connection in idle:
            connection.transport.close()
