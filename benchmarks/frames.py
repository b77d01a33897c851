"""The frames of one model call: this project's code between `SGLangModel.stream` and httpx's transport.

    python benchmarks/frames.py [--frames 7] [--files 3] [--slime-frames 8]

One call runs against a scripted server, and one more as slime makes it. When the request reaches the transport, the
chain is walked back to `stream`: the stack of the running task, then the suspended coroutines of the waiting task that
created it, and so on. Every frame under `src/` on this chain counts, up to the call of the transport. A function that
created a task and has returned counts too, because a reader must pass through it. Exits with 1 above a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import httpx

import strands_sglang

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from strands_sglang import SGLangModel  # noqa: E402
from strands_sglang.testing import ScriptedSGLang  # noqa: E402
from strands_sglang.trainers.slime import make_generate  # noqa: E402
from support.agents import build_chatml_tokenizer  # noqa: E402
from support.slime import Sample, slime_args, slime_sampling_params  # noqa: E402

SRC = Path(strands_sglang.__file__).resolve().parent.parent
STREAM = SGLangModel.stream.__code__

QUESTION = "What is 6 * 7?"
ANSWER = "42"


@dataclass
class Chain:
    """Traces tasks back to their creators, and collects the frames of one request, outermost first."""

    frames: list[tuple[str, str]] = field(default_factory=list)
    _creators: dict[asyncio.Task[Any], tuple[asyncio.Task[Any] | None, list[FrameType]]] = field(default_factory=dict)

    def create_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Create a task, and remember its creator and the stack."""
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        self._creators[task] = asyncio.current_task(loop), list(_stack(sys._getframe(1)))
        return task

    def capture(self) -> None:
        """Collect the chain that ends in the caller's frame."""
        frames = list(_stack(sys._getframe(1)))
        task = asyncio.current_task()
        while not any(frame.f_code is STREAM for frame in frames):
            task, created_by = self._creators.get(task, (None, []))
            waiting = [] if task is None else list(_suspended(task.get_coro()))
            if not waiting:
                raise SystemExit("the chain does not lead back to stream: a task was created from a callback")
            returned = [frame for frame in created_by if frame not in waiting and _is_inside(frame, waiting)]
            frames = [*waiting, *returned, *frames]
        codes = [frame.f_code for frame in frames]
        codes = codes[codes.index(STREAM) :]
        end = next(index for index, code in enumerate(codes) if code.co_name == "handle_async_request")
        ours = [code for code in codes[:end] if SRC in Path(code.co_filename).parents]
        self.frames = [
            (str(Path(code.co_filename).relative_to(SRC)), getattr(code, "co_qualname", code.co_name)) for code in ours
        ]


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Return the running frames, outermost first."""
    if frame is not None:
        yield from _stack(frame.f_back)
        yield frame


def _suspended(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of everything it waits for, outermost first, up to asyncio's futures."""
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            frame, inner = awaited.cr_frame, awaited.cr_await
        elif inspect.isasyncgen(awaited):
            frame, inner = awaited.ag_frame, awaited.ag_await
        elif inspect.isgenerator(awaited):
            frame, inner = awaited.gi_frame, awaited.gi_yieldfrom
        elif asyncio.isfuture(awaited):
            return
        else:  # objects such as `anext` of an asynchronous generator do not expose what they wait for
            inside = gc.get_referents(awaited)
            awaited = next((each for each in inside if inspect.isawaitable(each) or inspect.isasyncgen(each)), None)
            continue
        yield frame
        awaited = inner


def _is_inside(frame: FrameType, waiting: list[FrameType]) -> bool:
    """Return whether a waiting frame has called this one, directly or not."""
    return any(outer in waiting for outer in _stack(frame.f_back))


class Capturing(httpx.AsyncBaseTransport):
    """Transport that forwards requests, and collects the chain of the one to `/generate`."""

    def __init__(self, transport: httpx.AsyncBaseTransport, chain: Chain) -> None:
        self._transport, self._chain = transport, chain

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            self._chain.capture()
        return await self._transport.handle_async_request(request)


async def plain_call(tokenizer: Any, transport: httpx.AsyncBaseTransport) -> None:
    async with strands_sglang.SGLangClient("http://scripted", transport=transport) as client:
        model = SGLangModel(tokenizer=tokenizer, client=client)
        async for _ in model.stream([{"role": "user", "content": [{"text": QUESTION}]}]):
            pass


async def slime_call(tokenizer: Any, transport: httpx.AsyncBaseTransport) -> None:
    state = SimpleNamespace(tokenizer=tokenizer, aborted=False)
    generate = make_generate(
        system_prompt="Be brief.", generate_state=lambda args: state, client_settings={"transport": transport}
    )
    await generate(slime_args(), Sample(index=0, prompt=QUESTION), slime_sampling_params())


def frames_of(call: Callable[[Any, httpx.AsyncBaseTransport], Awaitable[None]]) -> list[tuple[str, str]]:
    """Return file and function of each frame of one call, outermost first."""
    chain, tokenizer = Chain(), build_chatml_tokenizer()

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(chain.create_task)
        await call(tokenizer, Capturing(ScriptedSGLang(tokenizer, [ANSWER]).transport(), chain))

    asyncio.run(main())
    return chain.frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=7, help="maximum number of frames of a call")
    parser.add_argument("--files", type=int, default=3, help="maximum number of their files")
    parser.add_argument("--slime-frames", type=int, default=8, help="maximum number of frames of a call under slime")
    arguments = parser.parse_args()
    is_above = False
    for name, call, limit in [
        ("one call", plain_call, arguments.frames),
        ("one call under slime", slime_call, arguments.slime_frames),
    ]:
        frames = frames_of(call)
        files = {file for file, _ in frames}
        print(f"{name}: {len(frames)} frames of at most {limit}, {len(files)} files of at most {arguments.files}")
        print(*(f"    {file}: {function}" for file, function in frames), sep="\n")
        is_above |= len(frames) > limit or len(files) > arguments.files
    sys.exit(is_above)


if __name__ == "__main__":
    main()
