"""Episodes on the scripted server that are killed at random moments, as a program: it forks them from a single thread.

    PYTHONPATH=src:tests python tests/support/killing.py KILLS [SEED]

Each is resumed from a copy of its journal at another path, and by another user if the program may change it.

Prints a JSON object with what went wrong, and how much was tried.
"""

import asyncio
import json
import os
import pickle
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork

from strands import Agent, tool

from strands_env.core import Action, Environment, TaskContext, has_effect
from strands_sglang import Journal, JournalError, SGLangModel, Trajectory
from strands_sglang.credit import training_rows
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import build_chatml_tokenizer, call
from support.environments import Contains

MOST_KILLS = 5
"""Most kills of one episode."""
HEAD = "<|im_start|>assistant\n"
TOKENIZER = build_chatml_tokenizer()


class Script:
    """The answers of a main agent and of its helper, by their position in the conversation.

    The server keeps nothing between requests, so one that has started again answers like the one before it. An answer
    is aborted after each of its `cuts`.
    """

    def __init__(self, chance, has_helper=True):
        calls = [
            lambda: call("add", number=chance.randint(1, 9)),
            lambda: call("send", text=f"text {chance.getrandbits(40)}"),
            lambda: call("missing", x=1),
            lambda: "<tool_call>\n{not json\n</tool_call>",
        ]
        if has_helper:
            calls.append(lambda: call("ask_helper", question=f"question {chance.getrandbits(40)}"))
        turns = [
            "".join(chance.choice(calls)() for _ in range(chance.randint(1, 3))) for _ in range(chance.randint(1, 5))
        ]
        self.answers = [*turns, "All done."]
        self.helper = [call("look", place=chance.randint(1, 99)), "Nothing there."][chance.randint(0, 1) :]
        self.user = ["Thanks. Again?"] if chance.random() < 0.3 else []
        self.cuts = {position: sorted(chance.sample(range(2, 12), 2)) for position in range(8) if chance.random() < 0.3}
        self.helper_effect = chance.choice(["pure", "idempotent"])
        self.settings = chance.choice(
            [
                {},
                {},
                {"max_tool_iterations": chance.randint(1, 4)},
                {"max_tool_calls": chance.randint(1, 6)},
                {"max_parallel_tool_calls": 1},
                {"max_turns": chance.randint(1, 5)},
                {"max_sampled_tokens": chance.randint(20, 200)},
                {"fork_points": 2},
                {"fork_points": "none"},
            ]
        )

    def __call__(self, request):
        """Return what follows the sampled tokens in the prompt of a request."""
        answers = self.helper if "You help." in request.text else self.answers
        before, _, begun = request.text.rpartition(HEAD)
        position = before.count(HEAD)
        ids = TOKENIZER.encode(answers[min(position, len(answers) - 1)], add_special_tokens=False)
        sampled = len(TOKENIZER.encode(begun, add_special_tokens=False))
        cut = next((cut for cut in self.cuts.get(position, ()) if sampled < cut < len(ids)), None)
        if cut is not None:
            return ScriptedAnswer(token_ids=ids[sampled:cut], finish_reason="abort", latency_s=0.0005)
        return ScriptedAnswer(token_ids=ids[sampled:], latency_s=0.0005)


class Counts(Environment):
    """Counts in its own state; whatever `send` sends is written to a pipe, at whose other end is another process."""

    def __init__(self, model, script, effects, **settings):
        super().__init__(lambda: model, Contains(), "Count.", **{"max_tool_iterations": None, **settings})
        self.model, self.script, self.effects, self.total = model, script, effects, None

    async def reset(self):
        self.total = 0

    async def save_state(self):
        return {"total": self.total}

    async def load_state(self, state):
        self.total = state["total"]

    async def next_user_message(self, action, messages):
        said = sum("text" in message["content"][0] for message in messages if message["role"] == "user")
        return self.script.user[said - 1] if said <= len(self.script.user) else None

    def identity(self):
        return {"class": "Counter"}

    def get_tools(self):
        @has_effect("idempotent")
        @tool
        async def add(number: int) -> str:
            """Add a number.

            Args:
                number: The number.
            """
            await asyncio.sleep(0.0005)
            self.total += number
            return f"added {number}"

        @tool
        async def send(text: str) -> str:
            """Send a text.

            Args:
                text: The text.
            """
            os.write(self.effects, f"{text}\n".encode())
            await asyncio.sleep(0.0005)
            return "sent"

        @has_effect("pure")
        @tool
        def look(place: int) -> str:
            """Look at a place.

            Args:
                place: Its number.
            """
            return f"nothing at {place}"

        @has_effect(self.script.helper_effect)
        @tool
        async def ask_helper(question: str) -> str:
            """Ask a helper.

            Args:
                question: The question.
            """
            helper = Agent(self.model, tools=[look], system_prompt="You help.", callback_handler=None)
            return str(await helper.invoke_async(question))

        return [add, send, ask_helper]


def facts_of(result):
    """What an interrupted episode must have in common with one that was not, as plain data."""
    trajectory = result.observation.trajectory
    metrics = result.observation.metrics
    rows = training_rows([result.episode("count", id="count")], baseline=None)
    exported = [
        (list(row.token_ids), list(row.loss_mask), list(row.logprobs), list(row.versions), list(row.advantages))
        for row in rows
    ]
    calls = [block for message in result.observation.messages for block in message["content"]]
    return {
        "outcome": result.termination_reason.value,
        "reward": None if result.reward is None else result.reward.reward,
        "rows": sorted(exported, key=str),
        "counts": {
            name: metrics[name] for name in ("model_calls", "tool_iterations", "tool_calls", "tool_parse_errors")
        },
        "said": [
            (next(iter(block)), str(block.get("text")), str(block.get("toolResult", {}).get("content")))
            for block in calls
        ],
        "id": trajectory.id,
        "turns": [turn.output_ids.tolist() for turn in trajectory.turns],
        "error": result.error,
    }


async def play(script, path, effects):
    """Begin or resume the episode of a journal."""
    server = ScriptedSGLang(TOKENIZER, script)
    model = SGLangModel(
        tokenizer=TOKENIZER, client=server.client(), sampling_params={"max_new_tokens": 300}, on_abort="resume"
    )
    environment = Counts(model, script, effects, journal=path, **script.settings)
    begin = Action(message="Count.", task_context=TaskContext(id=path.stem, ground_truth="done"))
    try:
        (result,) = await environment.resume(path)
    except (JournalError, OSError):  # nothing has begun
        result = await environment.step(begin)
    return {**facts_of(result), "total": environment.total}


def elsewhere(path):
    """Copy a journal to another folder, which any user may write."""
    os.umask(0)
    folder = Path(tempfile.mkdtemp(dir=path.parent.parent))
    folder.chmod(0o777)
    if path.exists():
        shutil.copyfile(path, folder / path.name)
    return folder / path.name


def in_child(script, path, effects, seconds, user=None):
    """Play in a process of its own, which is killed after some seconds.

    Returns:
        What it returned; None if it was killed.
    """
    answer = path.with_suffix(".pickle")
    child = os.fork()
    if child == 0:
        try:
            if user is not None:
                os.setuid(user)
            facts = asyncio.run(play(script, path, effects))
            answer.write_bytes(pickle.dumps(facts))
            os._exit(0)
        except BaseException:
            __import__("traceback").print_exc()
        finally:
            os._exit(1)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], seconds)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return None
    assert status == 0, f"the episode of {path} raised"
    return pickle.loads(answer.read_bytes())


def differences(found, wanted):
    """Return what two values do not share, short enough to read; rows as the texts that they train."""
    if not isinstance(found, list):
        return str(found), str(wanted)
    pairs = (
        (Counter(map(str, found)), Counter(map(str, wanted))),
        (Counter(map(str, wanted)), Counter(map(str, found))),
    )
    only = [[one for one in found + wanted if (own - other)[str(one)]] for own, other in pairs]
    return [[trained(one) if isinstance(one[0], list) else str(one) for one in own] for own in only]


def trained(row):
    """The trained text of a row, and its hidden facts as numbers."""
    ids = [token_id for token_id, mask in zip(row[0], row[1], strict=True) if mask]
    return TOKENIZER.decode(ids), len(row[0]), set(map(str, row[3])), set(row[4])


def open_effects(path):
    """Whether a call that must not run twice has begun and not ended, or its end is in no state that was kept."""
    found, ended = set(), set()
    for entry in Journal(path).entries():
        if entry.kind == "tool" and entry.data["effect"] == "once":
            found.add(entry.data["call"])
        if entry.kind == "result":
            ended.add(entry.data["call"])
        if "state" in entry.data:
            found -= ended
    return found


def received(path):
    """The sampled tokens of each turn in a journal, and its identity; nothing if no turn is in it."""
    turns = Trajectory.load(path)
    return [turn.output_ids.tolist() for turn in turns.turns if turn.output_ids], turns.id


def lost(before, after):
    """The answers, or parts of them, that are in no turn; each turn has one."""
    left, missing = sorted(after, key=len), []
    for ids in sorted(before, key=len, reverse=True):
        found = next((turn for turn in left if turn[: len(ids)] == ids), None)
        if found is None:
            missing.append(ids)
        else:
            left.remove(found)
    return missing


def one_episode(seed, folder, left, report):
    """Kill an episode at random moments until it ends."""
    chance = random.Random(seed)
    script = Script(chance)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def sent():
        try:
            return os.read(reader, 1 << 20).decode().splitlines()
        except BlockingIOError:
            return []

    began = time.monotonic()
    whole = in_child(script, folder / f"{seed}-whole.journal", writer, 60)
    usual = time.monotonic() - began
    wanted = sent()
    path, effects, kills, facts = folder / "killed" / f"{seed}.journal", [], 0, None
    before, identity, may_be_interrupted = [], None, False
    while facts is None:
        may_die = kills < min(MOST_KILLS, left)
        path, user = elsewhere(path), None if os.getuid() else 10_000 + kills
        facts = in_child(script, path, writer, chance.uniform(0.002, usual) if may_die else 60, user)
        effects += sent()
        if facts is None:
            kills += 1
            if path.exists() and Journal(path).entries():
                before, new = received(path)
                may_be_interrupted = bool(open_effects(path))
                if before:
                    report["identities"] += identity not in (None, new)
                    identity = new
    os.close(reader)
    os.close(writer)
    report["kills"] += kills
    report["episodes"] += 1
    report["twice"] += sum(count - 1 for count in Counter(effects).values())
    report["lost"] += len(lost(before, facts["turns"]))
    report["identities"] += identity not in (None, facts["id"])
    if facts["outcome"] == "interrupted":
        report["interrupted"] += 1
        if not may_be_interrupted:
            report["wrong"].append((seed, "interrupted", facts["error"]))
    else:
        for name in set(whole) - {"id", "turns", "total"}:
            if facts[name] != whole[name]:
                report["wrong"].append((seed, name, differences(facts[name], whole[name])))
        if sorted(effects) != sorted(wanted):
            report["wrong"].append((seed, "effects", effects, wanted))
        if facts["total"] not in (whole["total"], None):  # None if it had ended
            report["wrong"].append((seed, "total", facts["total"], whole["total"]))
    return kills


def main(kills, seed=0):
    """Kill episodes until there were enough kills."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        run(kills, Path(folder), seed)


def run(kills, folder, seed):
    """Kill episodes in a folder, and print what happened."""
    asyncio.run(play(Script(random.Random(0)), folder / "first.journal", os.open(os.devnull, os.O_WRONLY)))
    report = {"kills": 0, "episodes": 0, "interrupted": 0, "lost": 0, "twice": 0, "identities": 0, "wrong": []}
    while report["kills"] < kills:
        one_episode(seed, folder, kills - report["kills"], report)
        seed += 1
    print(json.dumps(report, default=str))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
