"""Costs of recording: CPU to attach a call to a long history, and memory per recorded token.

    python benchmarks/trajectory.py

Goals: at most 5 ms of CPU for a history of 1 MB in 500 messages, at most 16 bytes a token, both linear.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from array import array

from strands_sglang import Trajectory
from strands_sglang.messages import fingerprint
from strands_sglang.protocol.generation import Generation

PARTS = {"system prompt": "Be brief.", "tools": None, "chat template": "x" * 4000, "template arguments": "{}"}


def history(messages: int, size: int) -> list[dict]:
    text = "The quick brown fox jumps over the lazy dog. " * (size // messages // 45 + 1)
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": [{"text": f"{i} {text[: size // messages]}"}]} for i in range(messages)]


def attach_cost(messages: int, size: int) -> float:
    """Return the CPU seconds to fingerprint and attach a call whose history extends a recorded one."""
    conversation = history(messages + 1, size)
    trajectory = Trajectory()
    known = conversation[:-2]
    turn = trajectory.ask(trajectory.attach(fingerprint(PARTS, known), known), fingerprint(PARTS, known), [1])
    trajectory.answer(turn, Generation(array("i", [2]), array("d", [-1.0]), "stop"), conversation[-2])
    costs = []
    for _ in range(7):
        start = time.process_time()
        place = trajectory.attach(fingerprint(PARTS, conversation), conversation)
        costs.append(time.process_time() - start)
        assert place.turn is turn
    return min(costs)


def memory_per_token(turns: int, prompt: int, sampled: int) -> float:
    """Return the bytes per recorded token of an episode, including everything that its turns hold."""
    gc.collect()
    tracemalloc.start()
    trajectory = Trajectory()
    conversation: list[dict] = []
    for i in range(turns):
        conversation.append({"role": "user", "content": [{"text": f"question {i}"}]})
        asked = fingerprint(PARTS, conversation)
        turn = trajectory.ask(trajectory.attach(asked, conversation), asked, range(prompt))
        answer = {"role": "assistant", "content": [{"text": f"answer {i}"}]}
        generation = Generation(array("i", range(sampled)), array("d", [-0.5] * sampled), "stop")
        trajectory.answer(turn, generation, answer)
        conversation.append(answer)
    del conversation, asked, turn, answer, generation
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(trajectory) == turns
    return used / (turns * (prompt + sampled))


def main() -> None:
    for messages, size in ((100, 200_000), (500, 1_000_000), (1000, 2_000_000)):
        print(f"attach, {messages} messages, {size / 1e6:.1f} MB: {attach_cost(messages, size) * 1e3:.2f} ms of CPU")
    for turns, prompt, sampled in ((30, 300, 300), (30, 2000, 2000), (300, 300, 300)):
        cost = memory_per_token(turns, prompt, sampled)
        print(f"memory, {turns} turns of {prompt} prompt and {sampled} sampled tokens: {cost:.1f} bytes a token")


if __name__ == "__main__":
    main()
