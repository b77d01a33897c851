"""Recorded episodes run again: the same code gives no difference, changed code is found at its stage and turn."""

import asyncio
import base64
import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import weakref
import zlib
from dataclasses import replace
from itertools import cycle, islice

import pytest
from strands import tool
from strands.hooks import HookProvider
from strands.hooks.events import AfterInvocationEvent, AfterModelCallEvent, AfterToolCallEvent, BeforeModelCallEvent

from strands_env import cli
from strands_env.core import Action, Environment, RewardFunction, TaskContext, has_effect
from strands_env.eval import Evaluator
from strands_env.replay import STAGES, assert_replays, replay, replay_page, summary
from strands_sglang import SGLangModel, Trajectory
from strands_sglang.credit import Loss, TrainingRows, policy_loss
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import read
from strands_sglang.testing import ScriptedAnswer, ScriptedFault, ScriptedSGLang
from strands_sglang.tool_parsers import HermesToolParser
from strands_sglang.trajectory.journal import read_entries
from support.agents import build_chatml_tokenizer, call, make_agent
from support.specimens import write_step

MUTATIONS = 300


class Length(RewardFunction):
    """The length of the answer, and a constant."""

    def __init__(self, constant=0.25):
        self.constant = constant

    async def compute(self, *, action, step_result):
        return self.constant + len(step_result.observation.final_response or "")


class Shop(Environment):
    """Sells: `price` looks up, `ship` has effects, and hooks may change what it says."""

    def __init__(self, *args, hooks=(), surcharge=None, about="Look up a price.", **kwargs):
        super().__init__(*args, **kwargs)
        self.hooks, self.surcharge, self.about, self.asked = list(hooks), surcharge, about, []

    def get_hooks(self):
        return self.hooks

    def get_tools(self):
        @tool(description=self.about)
        def price(item: str) -> str:
            """Look up a price."""
            self.asked.append(item)
            extra = 1 if self.surcharge == len(self.asked) else 0
            return f"{item} costs {len(item) + extra}"

        @tool
        def ship(item: str) -> str:
            """Ship an item."""
            if item == "air":
                raise RuntimeError("there is none")
            return f"{item} is on its way"

        return [price, ship]


class Edits(HookProvider):
    """Changes what the n-th event of a kind has."""

    def __init__(self, kind, number, change):
        self.kind, self.number, self.change, self.seen = kind, number, change, 0

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(self.kind, self.on_event)

    def on_event(self, event):
        if self.seen == self.number:
            self.change(event)
        self.seen += 1


class Checked(HookProvider):
    """Adds a remark to every result; part of the recorded environment."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(AfterToolCallEvent, self.check)

    def check(self, event):
        event.result = {**event.result, "content": [*event.result["content"], {"text": "(checked)"}]}


class Tidies(HookProvider):
    """Replaces a result with text."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(AfterToolCallEvent, self.tidy)

    def tidy(self, event):
        event.result = {
            "toolUseId": event.tool_use["toolUseId"],
            "status": "success",
            "content": [{"text": "(checked)"}],
        }


def script(seed):
    """Answers of an episode: some with one or two calls, the last with none."""
    rng = random.Random(seed)
    answers = []
    for number in range(rng.randint(2, 4)):
        text = f"Step {number}. " if rng.random() < 0.5 else ""
        calls = [call(rng.choice(["price", "ship"]), item=rng.choice(["tea", "honey", "air"])) for _ in range(2)]
        answers.append(text + "\n".join(calls[: rng.randint(1, 2)]))
    return [*answers, f"All done, {seed}."]


def server_of(tokenizer, seed):
    """A server that answers by the script."""
    answers = script(seed)
    return ScriptedSGLang(tokenizer, lambda request: answers[request.text.count("<|im_start|>assistant") - 1])


def environment(tokenizer, seed=0, *, client=None, model=None, **settings):
    """A factory of shops on a scripted server."""
    server = server_of(tokenizer, seed)
    defaults = {"sampling_params": {"max_new_tokens": 200, "temperature": 0.5}}

    def make(action):
        shared = SGLangModel(tokenizer=tokenizer, client=client or server.client(), **{**defaults, **(model or {})})
        return Shop(lambda: shared, **{"reward_fn": Length(), "hooks": [Checked()], **settings})

    return make


def with_tools(model_factory, *tools):
    """A factory of plain environments with these tools."""

    def create(action):
        env = Environment(model_factory)
        env.get_tools = lambda: list(tools)
        return env

    return create


def dead(tokenizer):
    """A client whose server must not be asked."""
    return ScriptedSGLang(tokenizer, [ScriptedFault("drop")] * 9).client(max_retries=0)


async def evaluate(folder, make, prompts=1):
    tasks = [Action(message=f"Buy {n}.", task_context=TaskContext(id=f"task-{n}")) for n in range(prompts)]
    await Evaluator(make, output_path=folder, keep_trajectories=True).run(tasks)
    return folder


async def replayed(path, make=None, **options):
    return [one async for one in replay([path], make, **options)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_chatml_tokenizer()


@pytest.fixture(scope="module")
def recorded(tokenizer, tmp_path_factory):
    """Twelve evaluations of one episode each, and three training steps."""
    folder = tmp_path_factory.mktemp("recorded")
    for seed in range(12):
        asyncio.run(evaluate(folder / f"shop-{seed}", environment(tokenizer, seed)))
    for seed in range(3):
        write_step(folder / f"step-{seed}", tokenizer, seed=seed, experts=False)
    return folder


# --- mutations: each returns what to replay, and the stage and the turns at which it shows ---


def _turns(folder):
    [file] = folder.glob("results.trajectories/*.safetensors")
    return Trajectory.load(file).turns


def _first_with_calls(turns):
    return next(turn.index for turn in turns if turn.tool_calls)


def a_byte_of_the_template(rng, tokenizer, seed, folder):
    before, after, turn = rng.choice(
        [
            ("<tool_response>", "<tool-response>", 1),
            ("# Tools", "# tools", 0),
            ("</tools>", "</tools >", 0),
            ("</tool_response>", "</tool_response>\n", 1),
        ]
    )
    template = tokenizer.chat_template.replace(before, after)
    assert template != tokenizer.chat_template
    return environment(tokenizer, seed, model={"chat_template": template}), {}, ("agent", {turn})


def a_rule_of_the_parser(rng, tokenizer, seed, folder):
    kind = rng.choice(["drops a call", "renames", "changes the input"])

    class Mutant(HermesToolParser):
        def parse_turn(self, *args, **kwargs):
            parsed = super().parse_turn(*args, **kwargs)
            calls = parsed.tool_calls[:-1]
            if kind == "renames":
                calls = [replace(one, name=one.name.upper()) for one in parsed.tool_calls]
            elif kind == "changes the input":
                calls = [replace(one, input={**one.input, "item": "salt"}) for one in parsed.tool_calls]
            return replace(parsed, tool_calls=tuple(calls))

    return (
        environment(tokenizer, seed, model={"tool_parser": Mutant()}),
        {},
        ("agent", {_first_with_calls(_turns(folder))}),
    )


def a_result_of_a_tool(rng, tokenizer, seed, folder):
    made = [(turn.index, one["name"]) for turn in _turns(folder) for one in turn.tool_calls]
    prices = [index for index, name in made if name == "price"]
    if not prices:
        return None
    number = rng.randrange(len(prices))
    # Calls of one answer run at the same time, in any order.
    return environment(tokenizer, seed, surcharge=number + 1), {"tools": "live"}, ("tools", {prices[number]})


def a_limit(rng, tokenizer, seed, folder):
    turns = _turns(folder)
    count = rng.randrange(1, len(turns))
    name = rng.choice(["max_turns", "max_tool_iterations", "max_sampled_tokens"])
    if name == "max_sampled_tokens":
        return environment(tokenizer, seed, max_sampled_tokens=len(turns[0].output_ids)), {}, ("agent", {1})
    return environment(tokenizer, seed, **{name: count}), {}, ("agent", {count})


def a_constant_of_the_reward(rng, tokenizer, seed, folder):
    return (
        environment(tokenizer, seed, reward_fn=Length(rng.choice([0.0, 0.2500001, -1, float("nan")]))),
        {},
        ("reward", {None}),
    )


def a_hook_on_answers(rng, tokenizer, seed, folder):
    number = rng.randrange(len(_turns(folder)) - 1)

    def change(event):
        event.stop_response.message["content"].insert(0, {"text": "Well."})

    hooks = [Checked(), Edits(AfterModelCallEvent, number, change)]
    return environment(tokenizer, seed, hooks=hooks), {}, ("agent", {number, number + 1})


def a_hook_on_results(rng, tokenizer, seed, folder):
    calls = [turn.index for turn in _turns(folder) for _ in turn.tool_calls]
    number = rng.randrange(len(calls))

    def change(event):
        event.result = {**event.result, "content": [{"text": "sold out"}]}

    hooks = [Checked(), Edits(AfterToolCallEvent, number, change)]
    return environment(tokenizer, seed, hooks=hooks), {}, ("agent", {calls[number] + 1})


def a_hook_on_questions(rng, tokenizer, seed, folder):
    number = rng.randrange(len(_turns(folder)))

    def change(event):
        event.agent.messages[-1]["content"].append({"text": "Hurry."})

    hooks = [Checked(), Edits(BeforeModelCallEvent, number, change)]
    return environment(tokenizer, seed, hooks=hooks), {}, ("agent", {number})


def the_system_prompt(rng, tokenizer, seed, folder):
    return environment(tokenizer, seed, system_prompt=rng.choice(["Be kind.", "."])), {}, ("agent", {0})


def a_tool_description(rng, tokenizer, seed, folder):
    return environment(tokenizer, seed, about=rng.choice(["Look up prices.", "Look up a price. "])), {}, ("agent", {0})


def a_sampling_parameter(rng, tokenizer, seed, folder):
    changed = rng.choice([{"temperature": 0.6}, {"max_new_tokens": 201}, {"top_p": 0.9}, {"stop": ["X"]}])
    params = {"max_new_tokens": 200, "temperature": 0.5, **changed}
    return environment(tokenizer, seed, model={"sampling_params": params}), {}, ("agent", {0})


def a_byte_of_the_record(rng, tokenizer, seed, folder):
    [file] = folder.glob("results.trajectories/*.safetensors")
    turn = rng.choice(_turns(folder))
    # An id that occurs once in the file, where the tensors are.
    content = bytearray(file.read_bytes())
    at = content.find(bytes(turn.output_ids))
    content[at + 4 * rng.randrange(len(turn.output_ids))] ^= 1
    file.write_bytes(content)
    return environment(tokenizer, seed), {}, ("record", {turn.index})


def an_outcome(rng, tokenizer, seed, folder):
    reason = rng.choice(["max_turns_reached", "max_tokens_reached"])
    results_of(folder, lambda record: record.update(termination_reason=reason))
    return environment(tokenizer, seed), {}, ("outcome", {_turns(folder)[-1].index})


def a_reward(rng, tokenizer, seed, folder):
    more = rng.choice([-1e-9, 1, 100])
    results_of(folder, lambda record: record.update(reward=record["reward"] + more))
    return environment(tokenizer, seed), {}, ("reward", {None})


def a_column_of_a_row(rng, tokenizer, seed, folder):
    """A step, and not the evaluation: a mask, an advantage, a weight, a logprob or a version of a row."""
    rows = TrainingRows.load(folder / "rows.safetensors")
    number = rng.randrange(len(rows))
    row = rows[number]

    kind = rng.choice(["loss_mask", "advantages", "loss_weight", "logprobs", "versions"])
    trained = [at for at, mask in enumerate(row.loss_mask) if mask]
    at = rng.choice(trained)
    spans = {}
    for span in row.spans:
        spans |= dict.fromkeys(range(len(spans), len(spans) + span.prompt_tokens + span.sampled_tokens), span.turn)
    allowed = {spans[at]}
    if kind == "loss_weight":
        changed, allowed = {"loss_weight": row.loss_weight * 1.5}, {None, *spans.values()}
    elif kind == "advantages":
        pairs = zip(row.advantages, row.loss_mask, strict=True)
        changed = {kind: [(0.5 - value) * mask for value, mask in pairs]}
        allowed = {None, *spans.values()}
    else:
        column = list(getattr(row, kind))
        column[at] = {"loss_mask": 0, "logprobs": row.logprobs[at] - 0.125, "versions": "77"}[kind]
        changed = {kind: column}
        if kind == "loss_mask" and len(trained) == 1:
            return None
    changed_rows = [*rows]
    changed_rows[number] = replace(row, **changed)
    replace_all = TrainingRows(
        changed_rows, rows.left_out, rows.flat_groups, rows.advantages, rows.rewards, rows.settings, rows.episodes
    )
    replace_all.save(folder / "rows.safetensors")
    return None, {}, (("record", "credit"), allowed)


OF_EPISODES = (
    *(a_byte_of_the_template, a_rule_of_the_parser, a_result_of_a_tool, a_limit, a_constant_of_the_reward),
    *(a_hook_on_answers, a_hook_on_results, a_hook_on_questions, the_system_prompt, a_tool_description),
    *(a_sampling_parameter, a_byte_of_the_record, an_outcome, a_reward),
)
OF_FILES = {a_byte_of_the_record, an_outcome, a_reward, a_column_of_a_row}


async def test_mutations_are_found_at_their_stage_and_turn(recorded, tokenizer, tmp_path, caplog):
    """Three hundred seeded changes of code and records: at least 99 % are located, by the stage and the turn."""
    caplog.set_level("CRITICAL")
    tried, wrong = 0, []
    for seed, mutate in islice(enumerate(cycle((*OF_EPISODES, a_column_of_a_row, a_column_of_a_row))), 2 * MUTATIONS):
        if tried == MUTATIONS:
            break
        rng = random.Random(seed)
        is_step = mutate is a_column_of_a_row
        number = rng.randrange(3 if is_step else 12)
        folder = recorded / (f"step-{number}" if is_step else f"shop-{number}")
        if mutate in OF_FILES:
            folder = shutil.copytree(folder, tmp_path / f"{seed}")
        mutated = mutate(rng, tokenizer, number, folder)
        if mutated is None:
            continue
        make, options, (stages, turns) = mutated
        came = await replayed(folder, make, **options)
        tried += 1
        places = {(one.difference.stage, one.difference.turn) for one in came if one.difference is not None}
        if not any(stage in stages and turn in turns for stage, turn in places):
            wrong.append((mutate.__name__, seed, stages, turns, [str(one) for one in came if not one.is_same]))
    assert tried == MUTATIONS
    assert len(wrong) <= MUTATIONS // 100, "\n".join(map(str, wrong))


def places(found):
    return [(one.difference.stage, one.difference.turn) for one in found if one.difference is not None]


def results_of(folder, change):
    """Change the first record of an evaluation."""
    [line, *rest] = (folder / "results.jsonl").read_text().splitlines()
    record = json.loads(line)
    change(record)
    (folder / "results.jsonl").write_text("\n".join([json.dumps(record), *rest]) + "\n")


async def test_a_prompt_that_begins_like_the_answer_differs_at_its_own_turn(recorded, tokenizer):
    """Later turns share more tokens with it: they begin with the answer, too."""
    seed = next(seed for seed in range(12) if script(seed)[0].startswith("<tool_call>"))
    template = tokenizer.chat_template + "{{- '<tool_call>\\n' }}"
    found = await replayed(recorded / f"shop-{seed}", environment(tokenizer, seed, model={"chat_template": template}))
    assert places(found) == [("agent", 0)]


@pytest.mark.parametrize("turn", [0, 1])
async def test_a_parser_that_raises_is_found_where_it_does(recorded, tokenizer, turn):
    class Raises(HermesToolParser):
        asked = 0

        def parse_turn(self, *args, **kwargs):
            Raises.asked += 1
            if Raises.asked > turn:
                raise ValueError("a mistake")
            return super().parse_turn(*args, **kwargs)

    found = await replayed(recorded / "shop-1", environment(tokenizer, 1, model={"tool_parser": Raises()}))
    assert places(found) == [("agent", turn)]
    assert "ValueError: a mistake" in str(found[0])


@pytest.mark.parametrize("outcome", ["timeout", "aborted", "agent_error", "max_turns_reached", "max_messages_reached"])
async def test_an_outcome_that_the_model_calls_contradict(tokenizer, tmp_path, outcome):
    """No run is steered by it: an episode whose clock had run out would be compared up to there only."""
    make = lambda action: Chat(lambda: SGLangModel(tokenizer=tokenizer, client=server.client()))  # noqa: E731
    server = ScriptedSGLang(tokenizer, lambda request: "Yes.")
    await evaluate(tmp_path, make)
    results_of(tmp_path, lambda record: record.update(termination_reason=outcome))
    assert places(await replayed(tmp_path, make)) == [("outcome", 2)]


@pytest.mark.parametrize("at", ["first", "last", "gone", "more"])
async def test_messages_that_the_run_does_not_have(recorded, tokenizer, tmp_path, at):
    shutil.copytree(recorded / "shop-1", tmp_path, dirs_exist_ok=True)

    def change(record):
        messages = record["observation"]["messages"]
        if at == "gone":
            messages.pop()
        elif at == "more":
            messages.append({"role": "assistant", "content": [{"text": "More."}]})
        else:
            messages[1 if at == "first" else -1]["content"].insert(0, {"text": "Forged."})

    results_of(tmp_path, change)
    turns = _turns(tmp_path)
    assert places(await replayed(tmp_path, environment(tokenizer, 1))) == [
        ("agent", 0 if at == "first" else turns[-1].index)
    ]


async def test_a_hook_after_the_last_answer_is_found_before_its_reward(recorded, tokenizer):
    hooks = [Checked(), Edits(AfterInvocationEvent, 0, lambda event: event.agent.messages.append(PS))]
    [one] = await replayed(recorded / "shop-1", environment(tokenizer, 1, hooks=hooks))
    assert (one.difference.stage, one.difference.now) == ("agent", PS["content"])


PS = {"role": "assistant", "content": [{"text": "PS: buy more."}]}


@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "logprobs"])
async def test_tokens_of_a_result_are_compared(tokenizer, tmp_path, name):
    make = environment(tokenizer, 1)
    evaluator = Evaluator(make, output_path=tmp_path, keep_trajectories=True, keep_tokens=True)
    await evaluator.run([Action(message="Buy.")])
    [one] = await replayed(tmp_path, make)
    assert one.stages["credit"] == "same"
    turn = _turns(tmp_path)[1]

    def change(record):
        record["observation"]["tokens"][name][turn.prompt_tokens] = 0

    results_of(tmp_path, change)
    assert places(await replayed(tmp_path, make)) == [("credit", 1)]


async def test_a_result_or_a_reward_function_that_is_gone(tokenizer, tmp_path):
    make = environment(tokenizer, 1)
    await evaluate(tmp_path, make, prompts=2)
    assert places(await replayed(tmp_path, environment(tokenizer, 1, reward_fn=None))) == [("reward", None)] * 2
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text().splitlines()[1] + "\n")
    assert sorted(one.is_same for one in await replayed(tmp_path, make)) == [False, True]
    [told] = [str(one) for one in await replayed(tmp_path, make) if not one.is_same]
    assert "its model calls are kept, but not its result" in told


async def test_an_outcome_that_a_step_contradicts(recorded, tmp_path):
    shutil.copytree(recorded / "step-0", tmp_path, dirs_exist_ok=True)
    name = TrainingRows.load(tmp_path / "rows.safetensors")[0].episode
    file = tmp_path / "trajectories" / f"{name}.safetensors"
    trajectory = Trajectory.load(file)
    trajectory.note_end(outcome="aborted", reward=trajectory.end.reward)
    trajectory.save(file)
    assert "record" in {stage for stage, _ in places(await replayed(tmp_path))}


async def test_nothing_differs_without_a_change(recorded, tokenizer):
    """No episode is accused, no server is asked, and every stage that a file holds is compared."""
    for seed in range(12):
        [one] = await replayed(recorded / f"shop-{seed}", environment(tokenizer, seed, client=dead(tokenizer)))
        assert one.difference is None, one
        assert list(one.stages) == [*STAGES]
        assert [one.stages[name] for name in ("record", "agent", "outcome", "reward")] == ["same"] * 4
        [one] = await replayed(recorded / f"shop-{seed}", environment(tokenizer, seed), tools="live")
        assert one.stages["tools"] == "same"
    steps = [one for seed in range(3) for one in await replayed(recorded / f"step-{seed}")]
    assert [one.stages["credit"] for one in steps if one.difference is None] == ["same"] * 24


async def test_the_loss_is_computed_again(recorded, tmp_path, monkeypatch):
    file = shutil.copytree(recorded / "step-0", tmp_path, dirs_exist_ok=True) / "rows.safetensors"
    rows = TrainingRows.load(file)

    async def stages_with(**changes):
        rows.loss = Loss("slime", 0.0)
        rows.loss = Loss("slime", policy_loss(rows))._replace(**changes)
        rows.save(file)
        assert TrainingRows.load(file).loss == rows.loss
        found = await replayed(tmp_path)
        return {one.stages["loss"] for one in found}, found[0]

    none = "not in the file"
    assert (await stages_with())[0] == {"same", none}  # an episode without a row has none
    stages, one = await stages_with(value=0.5)
    assert stages == {"differs", none} and "the loss slime: 0.5 in the record" in str(one)
    assert (await stages_with(clip=(0.0, 0.0)))[0] == {"differs", none}
    monkeypatch.setitem(sys.modules, "verl", None)  # as if it were not installed
    stages, one = await stages_with(name="verl:token-mean")
    assert one.is_same and re.match("recorded only: .*verl", one.stages["loss"])
    assert re.search(r"\n +7  loss: recorded only: .*verl", "\n".join(summary(await replayed(tmp_path))))
    stages, one = await stages_with(name="tinker:ppo")
    assert stages == {"it cannot be computed: no function computes the loss 'tinker:ppo'", none} and one.is_same
    monkeypatch.setattr("strands_sglang.credit._checked", lambda loss: loss)
    for hostile in ({"value": 10**400}, {"clip": (10**400, 0)}):
        stages, one = await stages_with(**hostile)
        assert stages - {none} <= {"differs", "it cannot be computed: int too large to convert to float"}


@pytest.mark.parametrize("loss", [("slime", None), ("slime", 0.0, 0.2), ("slime", 0.0, (0.2, None))])
def test_a_loss_that_is_not_made_of_numbers_is_not_saved(recorded, tmp_path, loss):
    rows = TrainingRows.load(recorded / "step-0" / "rows.safetensors")
    rows.loss = Loss(*loss)
    with pytest.raises(ValueError, match="its value is a number, and its clip are two"):
        rows.save(tmp_path / "rows.safetensors")
    assert not list(tmp_path.iterdir())


# --- what a file may hold ---


async def test_a_journal_replays(tokenizer, tmp_path):
    """A journal has what an evaluation has: the task, the messages, the results before hooks have changed them."""
    env = environment(tokenizer, 3, journal=tmp_path, max_tool_calls=2)(None)
    env.budgets = replace(env.budgets, max_tool_calls=2)
    await env.step(Action(message="Buy."))
    [one] = await replayed(tmp_path, environment(tokenizer, 3, client=dead(tokenizer), max_tool_calls=2))
    assert one.is_same, one
    [one] = await replayed(tmp_path, environment(tokenizer, 3, max_tool_calls=3))
    assert (one.difference.stage, one.changed) == ("agent", ["arguments.max_tool_calls"])
    assert "did not run" in str(one)


async def test_forks_and_resumed_episodes_replay(tokenizer, tmp_path):
    """What tools returned before a hook has changed it is kept for the calls before the fork, too."""
    env = environment(tokenizer, 3, journal=tmp_path)(None)
    result = await env.step(Action(message="Buy."))
    await env.fork(result, result.observation.trajectory.turns[-1].index, 2)
    assert findings(read([tmp_path])) == []  # the turns that forks share are not accused
    content = next(tmp_path.iterdir()).read_bytes()
    *_, last = read_entries(content)
    (tmp_path / "killed.journal").write_bytes(content[: last.end - 200])
    await environment(tokenizer, 3)(None).resume(tmp_path / "killed.journal")
    found = await replayed(tmp_path, environment(tokenizer, 3, client=dead(tokenizer)))
    assert [str(one) for one in found if not one.is_same] == []
    assert len(found) == 4


async def test_recorded_tools_do_not_run_and_live_ones_do(recorded, tokenizer):
    made = []

    def make(action):
        made.append(environment(tokenizer, 1)(action))
        return made[-1]

    await replayed(recorded / "shop-1", make)
    assert made[0].asked == []
    await replayed(recorded / "shop-1", make, tools="live")
    assert made[1].asked


async def test_sub_agents_replay_inside_live_tools(tokenizer, tmp_path):
    """A tool that asks the model in the same trajectory; recorded tools do not ask, and cannot tell if it does not."""
    answers = [call("count", what="tea"), "Four."]
    server = ScriptedSGLang(tokenizer, lambda request: "four" if "You count" in request.text else answers.pop(0))
    asks = True

    def make(client):
        model = SGLangModel(tokenizer=tokenizer, client=client)

        @tool
        async def count(what: str) -> str:
            """Count."""
            return str(await make_agent(model, system_prompt="You count.").invoke_async(what)) if asks else "four\n"

        return with_tools(lambda: model, count)

    await evaluate(tmp_path, make(server.client()))
    for tools in ("recorded", "live"):
        [one] = await replayed(tmp_path, make(dead(tokenizer)), tools=tools)
        assert one.is_same, one
    assert len(one.now.turns) == 3
    asks = False
    assert places(await replayed(tmp_path, make(dead(tokenizer)), tools="live")) == [("agent", 1)]
    assert places(await replayed(tmp_path, make(dead(tokenizer)))) == []


async def test_a_sub_agent_whose_tool_ran_again_replays(tokenizer, tmp_path):
    """The process died inside a tool that had asked: the resumed episode asked again, and a replay asks once."""

    def make(client):
        @has_effect("pure")
        @tool
        async def count(what: str) -> str:
            """Count."""
            agent = make_agent(model, system_prompt="You count.")
            return f"{await agent.invoke_async(what)} {await agent.invoke_async('Sure?')}"

        model = SGLangModel(tokenizer=tokenizer, client=client)
        env = Environment(lambda: model, journal=tmp_path / "whole")
        env.get_tools = lambda: [count]
        return env

    def answer(request):
        if "You count" in request.text:
            return "four"
        return "Done." if "<tool_response>" in request.text else call("count", what="tea")

    server = ScriptedSGLang(tokenizer, answer)
    await make(server.client()).step(Action(message="Buy."))
    content = next((tmp_path / "whole").iterdir()).read_bytes()
    turns = [entry for entry in read_entries(content) if entry.kind == "turn"]
    for number, killed_after in enumerate(turns[1:3]):
        file = tmp_path / f"killed-{number}.journal"
        file.write_bytes(content[: killed_after.end])
        await make(server.client()).resume(file)
        for tools in ("recorded", "live"):
            [one] = await replayed(file, lambda action: make(dead(tokenizer)), tools=tools)
            assert len(one.recorded.turns) == 5 + number
            assert one.is_same, (tools, one)


@pytest.mark.parametrize("when", [BeforeModelCallEvent, AfterInvocationEvent])
@pytest.mark.parametrize("is_journal", [False, True])
async def test_results_that_a_hook_has_removed_replay(tokenizer, tmp_path, when, is_journal):
    """A hook keeps the history short, and another one clears it: the results are still those that were returned."""

    def keep_short(event):
        messages = event.agent.messages
        messages[:] = (
            messages[:1] + messages[-2:] if when is BeforeModelCallEvent and len(messages) > 3 else messages[:1]
        )

    def make(client):
        hooks = lambda: [Edits(when, count, keep_short) for count in range(5)]  # noqa: E731
        answers = [*(call("price", item=item) for item in ("tea", "honey", "salt")), "Done."]
        client = client or ScriptedSGLang(tokenizer, answers).client()
        return lambda action: environment(tokenizer, client=client, hooks=hooks())(action)

    env = make(None)(None)
    if is_journal:
        env.journal = tmp_path
        await env.step(Action(message="Buy."))
    else:
        await evaluate(tmp_path, lambda action: env)
    for tools in ("recorded", "live"):
        [one] = await replayed(tmp_path, make(dead(tokenizer)), tools=tools)
        assert one.is_same, one


@pytest.mark.parametrize("value", [float("nan"), float("inf"), (1, 2), {1: 2, "a": 3}, 3**60])
async def test_results_that_a_file_holds_in_another_form_replay(tokenizer, tmp_path, value):
    @tool
    def odd() -> dict:
        """Be odd."""
        return {"status": "success", "content": [{"json": {"value": value}}]}

    def make(client):
        return with_tools(lambda: SGLangModel(tokenizer=tokenizer, client=client), odd)

    await evaluate(tmp_path, make(ScriptedSGLang(tokenizer, [call("odd"), "Done."]).client()))
    for tools in ("recorded", "live"):
        [one] = await replayed(tmp_path, make(dead(tokenizer)), tools=tools)
        assert one.is_same, (tools, one)


async def test_a_result_that_the_messages_hold_is_kept_once(tokenizer):
    @tool
    def scan() -> dict:
        """Scan a page."""
        page = {"name": "page", "format": "txt", "source": {"bytes": b"a page"}}
        return {"status": "success", "content": [{"text": "here"}, {"document": page}]}

    client = ScriptedSGLang(tokenizer, [call("scan"), "Done."]).client()
    env = with_tools(lambda: SGLangModel(tokenizer=tokenizer, client=client), scan)(None)
    result = await env.step(Action(message="Scan."))
    assert "a page" in str(result.observation.messages) and result.observation.trajectory.tool_results == {}


async def test_a_user_says_what_it_said(tokenizer, tmp_path):
    class Chat(Environment):
        said = 0

        async def next_user_message(self, action, messages):
            Chat.said += 1
            return f"More, {Chat.said}." if Chat.said < 3 else None

    server = ScriptedSGLang(tokenizer, lambda request: "Yes.")
    make = lambda client: lambda action: Chat(lambda: SGLangModel(tokenizer=tokenizer, client=client))  # noqa: E731
    await evaluate(tmp_path / "e", make(server.client()))
    [one] = await replayed(tmp_path / "e", make(dead(tokenizer)))
    assert one.is_same, one
    assert Chat.said == 3


@pytest.mark.parametrize(
    ("answers", "config"),
    [
        ([call("price", item="tea"), "cut off by the limit"], {"sampling_params": {"max_new_tokens": 3}}),
        ([ScriptedAnswer("half an answer", finish_reason="abort")], {}),
        ([ScriptedAnswer("half an answer", finish_reason="abort"), "and the rest"], {"on_abort": "resume"}),
        (["too long " * 40], {"max_context_tokens": 420}),
        (["broken <tool_call>{", "sorry"], {}),
    ],
)
async def test_cut_and_failed_turns_replay(tokenizer, tmp_path, answers, config):
    server = ScriptedSGLang(tokenizer, answers)
    env = environment(tokenizer, client=server.client(), model=config, journal=tmp_path)(None)
    await env.step(Action(message="Buy."))
    file = next(tmp_path.glob("*.journal"))
    found = await replayed(file, environment(tokenizer, client=dead(tokenizer), model=config))
    told = str(found[0])
    assert found[0].is_same or "the episode has not ended" in told, told


class Chat(Environment):
    """A user who asks three times, and then does as `last` says."""

    last = None

    async def next_user_message(self, action, messages):
        asked = sum(message["role"] == "user" for message in messages)
        if asked == 3 and self.last == "hangs":
            await asyncio.Event().wait()
        if asked == 3 and self.last == "raises":
            raise RuntimeError("the user left")
        return "More." if asked < 3 or self.last == "stays" else None


class ReadsTokens(RewardFunction):
    async def compute(self, *, action, step_result):
        observation = step_result.observation
        return len(observation.tokens.token_ids) + len(observation.trajectory.turns)


@pytest.mark.parametrize("kind", ["hangs in a call", "user hangs", "user raises", "budget", "submits", "reads tokens"])
async def test_every_end_replays(tokenizer, tmp_path, kind):
    """Clocks, users, budgets and tools that end an episode end its replay at the same place."""

    @tool(context=True)
    def submit(answer: str, tool_context) -> str:
        """Submit."""
        tool_context.invocation_state["request_state"]["stop_event_loop"] = True
        return "submitted"

    slow = ScriptedAnswer("late", latency_s=60)
    answers = [call("submit", answer="4")] if kind == "submits" else ["Yes."] * 5
    server = ScriptedSGLang(tokenizer, ["Yes.", slow] if kind == "hangs in a call" else answers)
    clocks = {"episode_timeout": 2} if "hangs" in kind else {}
    limits = {"max_turns": 3} if kind == "budget" else {}

    def make(client):
        def create(action):
            model = SGLangModel(tokenizer=tokenizer, client=client)
            env = Chat(lambda: model, ReadsTokens(), **limits, **clocks)
            env.last = {"user hangs": "hangs", "user raises": "raises", "budget": "stays"}.get(kind)
            env.get_tools = lambda: [submit]
            return env

        return create

    await evaluate(tmp_path / "e", make(server.client()))
    for tools in ("recorded", "live"):
        [one] = await replayed(tmp_path / "e", make(dead(tokenizer)), tools=tools)
        assert one.is_same, (tools, one)


# --- bad input ---


async def test_results_that_no_file_can_hold_disturb_nothing(tokenizer, tmp_path):
    """The episode ends as without them, and its file is written; a lock cannot even be copied."""
    for content in ({1, 2}, threading.Lock()):

        @tool
        def odd() -> dict:
            """Be odd."""
            return {"status": "success", "content": [{"json": content}]}  # noqa: B023

        def make(action):
            server = ScriptedSGLang(tokenizer, lambda request: "Done." if "(checked)" in request.text else call("odd"))
            env = Shop(lambda: SGLangModel(tokenizer=tokenizer, client=server.client()), Length(), hooks=[Tidies()])
            env.get_tools = lambda: [odd]  # noqa: B023
            return env

        folder = tmp_path / type(content).__name__
        await evaluate(folder, make)
        [record] = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
        assert (record["termination_reason"], record["reward"]) == ("task_complete", 5.25)
        [file] = (folder / "results.trajectories").iterdir()
        assert Trajectory.load(file).tool_results == {}


async def test_what_cannot_run_is_named_and_the_rest_is_replayed(recorded, tokenizer, tmp_path):
    """A record without a user's message, an identity that raises, another provider's model."""
    make = environment(tokenizer, 1)
    results_of(shutil.copytree(recorded / "shop-1", tmp_path / "a"), lambda record: record.update(message=[]))
    shutil.copytree(recorded / "shop-1", tmp_path / "b")
    found = await replayed(tmp_path, make)
    assert [one.is_same for one in found] == [False, True]
    assert "it cannot run: ValueError: the last message of an action must have the role user" in str(found[0])

    class Other:
        """A model of another provider, which must not be asked."""

    [one] = await replayed(recorded / "shop-1", lambda action: Shop(Other))
    assert "only an SGLangModel can be replayed" in str(one)


async def test_a_run_that_takes_too_long_is_no_difference(recorded, tokenizer):
    [one] = await replayed(recorded / "shop-1", environment(tokenizer, 1, episode_timeout=1e-6))
    assert str(one) == "task-0 #0: not compared (agent: the run took more than 1e-06 s)"


async def test_a_reward_that_reads_a_state_is_compared_with_live_tools_only(tokenizer, tmp_path):
    class Cart(Shop):
        async def reset(self):
            self.asked = []

    class Bought(RewardFunction):
        async def compute(self, *, action, step_result):
            return len(cart.asked)

    cart = None

    def make(action):
        nonlocal cart
        shop = environment(tokenizer, 1)(action)
        cart = Cart(shop.model_factory, Bought(), hooks=[Checked()])
        return cart

    await evaluate(tmp_path / "e", make)
    stages = [(await replayed(tmp_path / "e", make, tools=tools))[0].stages["reward"] for tools in ("recorded", "live")]
    assert stages == ["recorded only: the environment has a state, which recorded tools do not change", "same"]


async def test_differences_hold_no_episode(recorded, tokenizer):
    """Thousands of them take no memory once the episodes are gone."""
    [one] = await replayed(recorded / "shop-1", environment(tokenizer, 1, system_prompt="Be kind."))
    recorded_turns = weakref.ref(one.recorded)
    one.recorded = one.now = None
    gc.collect()
    assert recorded_turns() is None
    assert "Be kind." in str(one)


async def test_ten_files_of_which_one_is_broken(tokenizer, tmp_path):
    make = environment(tokenizer, 2)
    await evaluate(tmp_path / "e", make, prompts=10)
    files = sorted((tmp_path / "e" / "results.trajectories").iterdir())
    files[3].write_bytes(files[3].read_bytes()[:500])
    files[5].unlink()
    found = await replayed(tmp_path / "e", make)
    assert sum(one.is_same for one in found) == 8
    assert any("--keep-trajectories" in str(one) for one in found)
    lines = [*summary(found)]
    assert lines[0] == "8 of 10 episodes replayed without a difference"
    assert lines[1].split() == ["2", "not", "compared"]


async def test_one_environment_for_all_episodes_is_left_as_it_was(tokenizer, tmp_path):
    shared = environment(tokenizer, 2, journal=tmp_path / "journals", retries=1)(None)
    await evaluate(tmp_path / "e", lambda action: shared, prompts=3)
    before = dict(vars(shared))
    for _ in range(2):
        found = await replayed(tmp_path / "e", lambda action: shared)
        assert [one.stages["reward"] for one in found] == ["same"] * 3
    assert {**vars(shared), "last_result": before["last_result"], "asked": before["asked"]} == before
    [one] = await replayed(next((tmp_path / "journals").iterdir()), lambda action: None)
    assert "it must be an Environment, not NoneType" in str(one)


async def test_an_environment_that_is_gone_or_changed(recorded, tokenizer):
    def gone(action):
        raise ModuleNotFoundError("No module named 'shop'")

    [one] = await replayed(recorded / "shop-1", gone)
    assert "the environment cannot be made: No module named 'shop'" in str(one)
    [one] = await replayed(recorded / "shop-1", environment(tokenizer, 1, system_prompt="Be kind.", max_turns=9))
    assert set(one.changed) == {"system_prompt", "arguments.max_turns"}
    assert "system_prompt" in "".join(summary([one]))
    [one] = await replayed(recorded / "shop-1")
    assert "no environment is given" in str(one)


async def test_a_tool_that_is_not_registered_any_more(recorded, tokenizer):
    def make(action):
        env = environment(tokenizer, 1)(action)
        env.get_tools = lambda: Shop.get_tools(env)[1:]
        return env

    [one] = await replayed(recorded / "shop-1", make)
    assert (one.difference.stage, one.difference.turn) == ("agent", 0)
    assert "tools changed" in str(one)


async def test_what_holds_no_episode_is_named(tmp_path):
    (tmp_path / "trajectory.safetensors").write_bytes(b"")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "trajectory.safetensors"):
        [one] = await replayed(path)
        assert not one.is_same
        assert str(path) in str(one)


# --- for people ---


def test_assert_replays(recorded, tokenizer):
    assert_replays(recorded / "shop-1", environment(tokenizer, 1))
    assert_replays(recorded / "step-1")
    with pytest.raises(AssertionError, match=r"task-0 #0: agent, turn 0, token \d+: the prompt"):
        assert_replays(recorded / "shop-1", environment(tokenizer, 1, system_prompt="Be kind."))


async def test_the_page_shows_the_record_beside_the_run(recorded, tokenizer):
    found = await replayed(recorded / "shop-1", environment(tokenizer, 1, system_prompt="Be kind."))
    packed = re.search(r'id="index">([^<]*)<', replay_page(found))[1]
    index = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert [one["id"] for one in index["episodes"]] == ["recorded", "now"]
    [finding] = index["findings"]
    assert (finding["turn"], finding["why"]) == (0, str(found[0]).partition(": ")[2])


# --- the command ---


@pytest.fixture(scope="module")
def shop_results(tokenizer, tmp_path_factory):
    """Results of `strands-env eval` with the calculator, on a scripted server that is gone now."""
    folder = tmp_path_factory.mktemp("shop")
    tokenizer.save_pretrained(folder / "model")
    tasks = [{"question": f"What is {n} * 3?", "answer": str(3 * n)} for n in range(4)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def answer(request):
        return "It is 3." if "<tool_response>" in request.text else call("calculate", expression="1 * 3")

    with ScriptedSGLang(tokenizer, answer).serve() as url:
        given = ["--dataset", folder / "tasks.jsonl", "--env", "calculator", "--base-url", url, "--temperature", "0.5"]
        given += ["--tokenizer", folder / "model", "--output", folder / "results", "--keep-trajectories"]
        # Verbose: other levels of loggers would stay for later tests.
        assert cli.main(["eval", *map(str, given), "--verbose"]) == 0
    return folder / "results"


def test_the_command_replays_an_evaluation_as_it_was_run(shop_results, capsys, tmp_path, monkeypatch):
    """Without options all is the same; options say what they would change; the exit code and the JSON tell."""
    capsys.readouterr()
    assert cli.main(["replay", str(shop_results)]) == 0
    assert capsys.readouterr().out == "4 of 4 episodes replayed without a difference\n"
    assert cli.main(["replay", str(shop_results), "--system-prompt", "Be kind."]) == 1
    out = capsys.readouterr().out
    assert "agent, turn 0, token " in out
    assert "the prompt (system prompt changed)" in out
    assert "0 of 4 episodes replayed without a difference" in out
    other = ["--reward", "regex", "--reward-args", '{"pattern": "no"}']
    assert cli.main(["replay", str(shop_results), *other, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["difference"] and one["difference"]["stage"] for one in found] == [None, "reward", None, None]
    page = tmp_path / "replay.html"
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert cli.main(["replay", str(shop_results), "--system-prompt", "X", "--html", "--open", "-o", str(page)]) == 1
    assert page.read_text().startswith("<!doctype html>")
    assert opened == [f"{page.as_uri()}#finding-1"]
    assert cli.main(["replay", str(shop_results), "--env", "nothing"]) == 2
    assert cli.main(["replay", str(tmp_path / "nothing")]) == 2


def test_the_command_replays_all_that_a_folder_holds(shop_results, recorded, tmp_path, capsys):
    """A run has training steps besides its evaluations; one with an environment that is gone does not end the rest."""
    shutil.copytree(recorded / "step-0", tmp_path / "run" / "steps" / "step-000001")
    shutil.copytree(shop_results, tmp_path / "run" / "evaluation")
    assert len(TrainingRows.load(recorded / "step-0" / "rows.safetensors").episodes) == 8
    capsys.readouterr()
    assert cli.main(["replay", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == "12 of 12 episodes replayed without a difference\n"
    assert cli.main(["replay", str(tmp_path / "run"), "--env", "nothing"]) == 1
    told = capsys.readouterr()
    assert told.out == "8 of 9 episodes replayed without a difference\n     1  not compared\n"
    assert "results.jsonl: not compared (agent: the environment cannot be made: --env nothing: no such name" in told.err
    (tmp_path / "one.journal").touch()
    assert cli.main(["replay", str(tmp_path / "one.journal"), "--env", "calculator"]) == 2
    assert "no model is recorded with it: name --model or --tokenizer" in capsys.readouterr().err


def test_stopping_leaves_a_report(shop_results, monkeypatch, capsys):
    """Ctrl-C in the middle: what was seen is reported."""
    from strands_env import replay as module

    whole = module.recorded_episodes

    def stopped(path):
        for number, one in enumerate(whole(path)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield one

    monkeypatch.setattr(module, "recorded_episodes", stopped)
    capsys.readouterr()
    assert cli.main(["replay", str(shop_results)]) == 130
    assert "episodes replayed without a difference" in capsys.readouterr().out
