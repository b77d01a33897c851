"""An instant server: prepared `/generate` responses from one process, for all benchmarks that need no real SGLang.

    echo '{"text": "...", "output_ids": [1, 2]}' | python benchmarks/server.py

Every `POST /generate` is answered with the same text and ids, after `delay_s` seconds. What depends on the request is
right: the number of prompt tokens, which clients check, and the prompt's logprobs from `logprob_start_len` on, which
0.4.3 asks for. Needs the standard library only; prints its port, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

CONTEXT_LENGTH = 10_000_000
START = re.compile(rb'"logprob_start_len":\s*(\d+)')


class Response:
    """The response to every request, in pieces around what depends on the request."""

    def __init__(self, text: str, output_ids: list[int]) -> None:
        logprobs = [[-0.25 - (place % 7) / 8, token_id, None] for place, token_id in enumerate(output_ids)]
        meta_info = {
            "id": "x",
            "finish_reason": {"type": "stop", "matched": output_ids[-1]},
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": len(output_ids),
            "cached_tokens": 0,
            "e2e_latency": 0.01,
            "output_token_logprobs": logprobs,
        }
        body = json.dumps({"text": text, "output_ids": output_ids, "meta_info": meta_info}).encode()
        self.until_prompt = body[:-2] + b', "prompt_tokens": '

    def to(self, request: bytes) -> bytes:
        """Return the response to the body of a request."""
        start = request.find(b"[", request.find(b'"input_ids"'))
        end = request.find(b"]", start)
        prompt_tokens = request.count(b",", start, end) + 1
        body = self.until_prompt + b"%d" % prompt_tokens
        if asked := START.search(request, end) or START.search(request, 0, start):
            entries = b", ".join([b"[-0.125, 11, null]"] * (prompt_tokens - int(asked[1])))
            body += b', "input_token_logprobs": [' + entries + b"]"
        return ok(body + b"}}")


def ok(body: bytes, status: bytes = b"200 OK") -> bytes:
    """Return an HTTP response."""
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


MODEL_INFO = ok(json.dumps({"model_path": "instant", "has_image_understanding": False}).encode())
MODELS = ok(json.dumps({"data": [{"id": "instant", "max_model_len": CONTEXT_LENGTH}]}).encode())
MISSING = ok(b"{}", b"404 Not Found")


class Connection(asyncio.Protocol):
    """One connection: requests one after the other."""

    def __init__(self, response: Response, delay_s: float) -> None:
        self.response, self.delay_s = response, delay_s
        self.parts: list[bytes] = []
        self.missing = 0  # bytes of the request's body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.missing:
            data = b"".join([*self.parts, data])
            head, end, rest = data.partition(b"\r\n\r\n")
            self.parts = [data]
            if not end:
                return
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self.path = head.split(b" ", 2)[1]
            self.parts, self.missing, data = [], int(length[1]) if length else 0, rest
        self.parts.append(data)
        self.missing -= len(data)
        if self.missing <= 0:
            self.answer(b"".join(self.parts))
            self.parts, self.missing = [], 0

    def answer(self, body: bytes) -> None:
        if self.path != b"/generate":
            answers = {b"/model_info": MODEL_INFO, b"/get_model_info": MODEL_INFO, b"/v1/models": MODELS}
            self.transport.write(answers.get(self.path, MISSING))
        elif self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self.transport.write, self.response.to(body))
        else:
            self.transport.write(self.response.to(body))


async def main() -> None:
    """Serve until the standard input ends."""
    loop = asyncio.get_running_loop()
    settings = json.loads(sys.stdin.readline())
    delay_s = settings.pop("delay_s", 0.0)
    response = Response(**settings)
    server = await loop.create_server(lambda: Connection(response, delay_s), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
