"""CPU per request of `SGLangClient`, bare aiohttp (a floor: no checks, retries or aborts) and stock httpx.

    python benchmarks/client.py [--quick]

A mock server in a second process responds after 0.2 s with 512 sampled tokens and their logprobs. CPU is this process's
user and system time per request. Lag is the longest time for which the event loop was blocked. The table shows the best
of the rounds, as other processes can only make it worse. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import orjson

from strands_sglang.client.client import SGLangClient

LATENCY_S = 0.2
OUTPUT_TOKENS = 512
GOALS_MS = {1_000: 1.2, 32_000: 2.0}
"""Goals in milliseconds of CPU per request, by prompt length in tokens."""

Ask = Callable[[list[int]], Awaitable[Any]]


@dataclass(frozen=True)
class Load:
    prompt_tokens: int
    concurrent: int
    rounds: int


@dataclass(frozen=True)
class Measurement:
    cpu_ms: float
    wall_s: float
    lag_ms: float


LOADS = (Load(1_000, 300, 4), Load(32_000, 80, 6))
QUICK_LOADS = (Load(1_000, 100, 1), Load(32_000, 20, 1))


def serve(port_to: Any) -> None:
    """Return the same generation for every POST."""
    ids = [random.randrange(150_000) for _ in range(OUTPUT_TOKENS)]
    body = json.dumps(
        {
            "text": " token" * OUTPUT_TOKENS,
            "output_ids": ids,
            "meta_info": {
                "id": "x",
                "finish_reason": {"type": "length", "length": OUTPUT_TOKENS},
                "output_token_logprobs": [[-random.random(), token_id, None] for token_id in ids],
            },
        }
    ).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                await asyncio.sleep(LATENCY_S)
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**20, backlog=2048)
        port_to.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def measure(ask: Ask, load: Load) -> Measurement:
    """Send `load.concurrent` concurrent requests."""
    prompts = [[random.randrange(150_000) for _ in range(load.prompt_tokens)] for _ in range(load.concurrent)]
    lag, stop = 0.0, False

    async def watch() -> None:
        nonlocal lag
        while not stop:
            before = time.perf_counter()
            await asyncio.sleep(0)
            lag = max(lag, time.perf_counter() - before)
            await asyncio.sleep(0.001)

    watcher = asyncio.create_task(watch())
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask(prompt) for prompt in prompts))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    stop = True
    await watcher
    return Measurement(1e3 * cpu / load.concurrent, wall, 1e3 * lag)


async def ours(base_url: str, load: Load) -> list[Measurement]:
    async with SGLangClient(base_url, vocab_size=150_000) as client:

        def ask(prompt: list[int]) -> Awaitable[Any]:
            return client.generate(prompt, {"max_new_tokens": OUTPUT_TOKENS}, return_logprob=True)

        await ask([1])
        return [await measure(ask, load) for _ in range(load.rounds)]


async def bare_aiohttp(base_url: str, load: Load) -> list[Measurement]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1000)) as session:

        async def ask(prompt: list[int]) -> Any:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": OUTPUT_TOKENS}, "return_logprob": True}
            async with session.post(f"{base_url}/generate", data=orjson.dumps(body)) as response:
                return orjson.loads(await response.read())

        await ask([1])
        return [await measure(ask, load) for _ in range(load.rounds)]


async def stock_httpx(base_url: str, load: Load) -> list[Measurement]:
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def ask(prompt: list[int]) -> Any:
            body = {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": OUTPUT_TOKENS},
                "return_logprob": True,
            }
            return (await client.post(f"{base_url}/generate", json=body)).json()

        await ask([1])
        return [await measure(ask, load) for _ in range(max(1, load.rounds // 4))]


CLIENTS = {"SGLangClient": ours, "bare aiohttp": bare_aiohttp, "stock httpx": stock_httpx}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the load, to see that it runs")
    loads = QUICK_LOADS if parser.parse_args().quick else LOADS
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(sender,), daemon=True)
    server.start()
    try:
        base_url = f"http://127.0.0.1:{receiver.recv()}"
        print(
            f"{'client':<14}{'prompt ids':>11}{'in flight':>11}{'CPU ms/request':>16}{'wall s':>9}{'lag ms':>9}  goal"
        )
        for load in loads:
            for name, run in CLIENTS.items():
                rounds = asyncio.run(run(base_url, load))
                cpu = min(one.cpu_ms for one in rounds)
                wall, lag = (statistics.median(getattr(one, field) for one in rounds) for field in ("wall_s", "lag_ms"))
                goal = f"<= {GOALS_MS[load.prompt_tokens]:.1f} ms" if name == "SGLangClient" else ""
                row = f"{name:<14}{load.prompt_tokens:>11,}{load.concurrent:>11,}{cpu:>16.2f}{wall:>9.2f}{lag:>9.0f}"
                print(f"{row}  {goal}".rstrip(), flush=True)
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
