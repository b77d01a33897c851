"""Trajectories on disk and in other processes: bit-equal, readable by others, never half written; and so are errors."""

import concurrent.futures
import copy
import importlib
import inspect
import json
import math
import multiprocessing
import os
import pickle
import pkgutil
import re
import shutil
from array import array
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

import strands_env
import strands_sglang
from strands_env.cli import main
from strands_env.core import Action, Environment, TaskContext
from strands_env.eval import Evaluator, read_results
from strands_sglang import SGLangContextLengthError, SGLangHTTPError, SGLangModel, SGLangThrottledError, Trajectory
from strands_sglang.messages import fingerprint
from strands_sglang.messages.content import Picture
from strands_sglang.protocol.generation import Generation, SamplingMask
from strands_sglang.templates.images import ImageInputs
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from strands_sglang.trajectory.storage import TrajectoryFileError
from support.agents import call, make_agent, make_tools
from support.environments import StubEnvironment, lines, tasks

# --- Trajectories on disk: bit-equal, readable by others, never half written ---


@pytest.fixture
async def episode(rollout):
    """A model after an episode with a tool call, a call that did not parse, a fork, a failure, and prompt logprobs."""
    _, model = rollout(
        [call(expression="2 * 3"), "<tool_call>oops</tool_call>", "Six.", "Edited."], return_prompt_logprobs=True
    )
    agent = make_agent(model, make_tools()[0])
    await agent.invoke_async("2 times 3?")
    agent.messages[0]["content"][0]["text"] = "edited"
    await agent.invoke_async("again")
    with pytest.raises(Exception, match="501"):
        await agent.invoke_async("the script has run out")
    return model


@pytest.fixture
def recorded(episode):
    return episode.trajectory


async def test_what_is_loaded_is_what_was_saved(recorded, tmp_path):
    def same(one, other):
        """NaN is equal to itself here."""
        return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True))

    recorded.save(tmp_path / "episode.safetensors")
    loaded = Trajectory.load(tmp_path / "episode.safetensors")
    assert loaded.explain() == recorded.explain()
    assert loaded.tool_parse_errors == recorded.tool_parse_errors == {"unknown_tool": 1}
    assert len(loaded.sequences()) == 2
    for ours, theirs in zip(loaded.sequences(), recorded.sequences(), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.segment_info == theirs.segment_info
        assert [s.weight_versions for s in ours.segments] == [s.weight_versions for s in theirs.segments]
        assert ours.policy_versions == theirs.policy_versions
    for ours, theirs in zip(loaded.turns, recorded.turns, strict=True):
        assert (ours.status, ours.reason, ours.key) == (theirs.status, theirs.reason, theirs.key)
        assert (ours.tool_calls, ours.sampling_params) == (theirs.tool_calls, theirs.sampling_params)
        if theirs.generation is not None:
            assert ours.generation.meta_info == theirs.generation.meta_info
            assert same(ours.prompt_logprobs, theirs.prompt_logprobs)


async def test_what_is_loaded_and_saved_again_is_the_same(recorded, tmp_path):
    recorded.save(tmp_path / "one")
    Trajectory.load(tmp_path / "one").save(tmp_path / "two")
    files = [safe_open(tmp_path / name, framework="numpy") for name in ("one", "two")]
    first, second = ((file.metadata(), {n: file.get_tensor(n).tobytes() for n in file.keys()}) for file in files)
    assert first == second


async def test_a_loaded_trajectory_knows_which_answers_were_discarded_and_judges_the_others(rollout, tmp_path):
    _, model = rollout(lambda request: f"answer {request.index}")
    agent = make_agent(model)
    for question in "ab":
        await agent.invoke_async(question)
        agent.messages[-1]["content"] = [{"text": f"REPLACED-{question}"}]
    model.trajectory.save(tmp_path / "t")
    model.trajectory = loaded = Trajectory.load(tmp_path / "t")
    loaded.settle(agent.messages)
    assert [turn.status.value for turn in loaded.turns] == ["discarded", "discarded"]
    assert [turn.note for turn in loaded.turns] == [
        f"message {i} (assistant) stands in its place, with other text" for i in (1, 3)
    ]


async def test_a_loaded_trajectory_is_extended_like_the_one_that_was_saved(rollout, tmp_path):
    server, model = rollout(["One.", "Two."])
    agent = make_agent(model)
    await agent.invoke_async("a")
    model.trajectory.save(tmp_path / "t")
    model.trajectory = Trajectory.load(tmp_path / "t")
    await agent.invoke_async("b")
    (sequence,) = model.trajectory.sequences()
    assert sequence.token_ids == server.requests[1].input_ids + server.responses[1].body["output_ids"]
    assert sum(sequence.loss_mask) == sum(len(response.body["output_ids"]) for response in server.responses)


async def test_the_file_can_be_read_without_this_library(recorded, tmp_path):
    recorded.save(tmp_path / "t.safetensors")
    tensors = load_file(tmp_path / "t.safetensors")
    turns = json.loads(tensors["trajectory"].tobytes())["turns"]
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "prompt_ids": "int32",
        "output_ids": "int32",
        "logprobs": "float64",
        "prompt_logprobs": "float64",
        "trajectory": "uint8",
    }
    sampled = [turn["answer"]["sampled_tokens"] for turn in turns if turn["answer"]]
    assert tensors["output_ids"].tolist() == [i for turn in recorded.turns for i in turn.output_ids]
    assert sum(sampled) == len(tensors["output_ids"]) == len(tensors["logprobs"])
    assert [turn["parent"] for turn in turns][:3] == [None, 0, 1]


async def test_routed_experts_come_back_bit_by_bit(recorded, tmp_path):
    generation = recorded.turns[0].generation
    experts = np.arange(generation.routed_rows * 6, dtype="<i4")
    import base64

    object.__setattr__(generation, "routed_experts", base64.b64encode(experts.tobytes()).decode())
    recorded.save(tmp_path / "t")
    assert Trajectory.load(tmp_path / "t").turns[0].generation.routed_experts == generation.routed_experts


async def test_what_a_server_tells_may_have_any_size(recorded):
    """A15 (p14): what is not tokens was in the header, which safetensors limits to 100 MB."""
    generation = recorded.turns[0].generation
    large = {**generation.meta_info, "told": "x" * 101_000_000}
    recorded.turns[0].generation = replace(generation, meta_info=large)
    loaded = Trajectory.from_bytes(recorded.to_bytes())
    assert len(loaded.turns[0].generation.meta_info["told"]) == 101_000_000


async def test_sampling_masks_come_back_token_by_token(recorded, tmp_path):
    first, _, third, *_ = recorded.turns
    for turn in (first, third):
        rows = [[token_id, *range(token_id % 4)] for token_id in turn.output_ids]
        mask = SamplingMask(array("i", sum(rows, [])), array("i", map(len, rows)))
        logprobs = array("d", [-0.5] * len(rows))
        turn.generation = replace(turn.generation, sampling_mask=mask, sampling_logprobs=logprobs)
    recorded.save(tmp_path / "t")
    loaded = Trajectory.load(tmp_path / "t")
    for ours, theirs in zip(loaded.turns, recorded.turns, strict=True):
        if theirs.generation is not None:
            assert ours.generation.sampling_mask == theirs.generation.sampling_mask
            assert ours.generation.sampling_logprobs == theirs.generation.sampling_logprobs
    tensors = load_file(tmp_path / "t")
    assert len(tensors["sampling_mask.lengths"]) == len(first.output_ids) + len(third.output_ids)
    assert str(tensors["sampling_mask.ids"].dtype) == "int32"


def test_images_come_back_bit_by_bit(tmp_path):
    torch = pytest.importorskip("torch")
    pixels = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()  # not contiguous
    pictures = (Picture(b"\x00first", "png", "messages[0]"), Picture(b"second", "jpeg", "messages[2]"))
    halves = torch.tensor([[0.5, -1.25]], dtype=torch.bfloat16)  # a type that numpy lacks
    tensors = {"pixel_values": pixels, "grid": torch.tensor([[1, 2, 3]]), "halves": halves}
    images = ImageInputs(pictures, array("i", [5, 6]), tensors)
    messages = [{"role": "user", "content": [{"text": "What is that?"}]}]
    recorded = Trajectory()
    asked = fingerprint({}, messages)
    turn = recorded.ask(recorded.attach(asked, messages), asked, [5, 5, 5, 6], images=images)
    generation = Generation(array("i", [7]), array("d", [-1.0]), "stop")
    recorded.answer(turn, generation, {"role": "assistant", "content": [{"text": "a"}]})
    recorded.save(tmp_path / "t")
    loaded = Trajectory.load(tmp_path / "t")
    assert loaded.turns[0].images.pictures == pictures
    assert loaded.turns[0].sent_ids() == turn.sent_ids() == [5, 6, 7]
    ours, theirs = (trajectory.sequences()[0].multimodal_train_inputs for trajectory in (loaded, recorded))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)


async def test_an_error_while_writing_leaves_the_old_file(recorded, tmp_path, monkeypatch):
    path = tmp_path / "t"
    path.write_bytes(b"old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        recorded.save(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["t"]


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(TrajectoryFileError, match="text: not a safetensors file"):
        Trajectory.load(tmp_path / "text")
    save_file({"x": np.zeros(1)}, tmp_path / "weights")
    with pytest.raises(TrajectoryFileError, match="weights: holds None"):
        Trajectory.load(tmp_path / "weights")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Trajectory.load(tmp_path / "nowhere")


def test_an_empty_trajectory_is_saved_and_loaded(tmp_path):
    Trajectory().save(tmp_path / "t")
    assert Trajectory.load(tmp_path / "t").sequences() == []


async def test_bytes_are_what_a_file_holds(recorded, tmp_path):
    recorded.save(tmp_path / "t")
    content = recorded.to_bytes()
    assert Trajectory.from_bytes(content).sequences()[0].tokens == recorded.sequences()[0].tokens
    assert len(content) == (tmp_path / "t").stat().st_size
    with pytest.raises(TrajectoryFileError, match="a sample: not a safetensors file"):
        Trajectory.from_bytes(content[:-1], name="a sample")


# --- Results and errors cross process boundaries: pickle, cloudpickle, `copy.deepcopy`, a real worker process ---


@pytest.fixture(
    params=[
        lambda value: pickle.loads(pickle.dumps(value)),
        lambda value: pickle.loads(cloudpickle.dumps(value)),
        copy.deepcopy,
    ],
    ids=["pickle", "cloudpickle", "deepcopy"],
)
def cross(request):
    return request.param


def test_every_error_crosses_with_all_that_it_says(cross):
    """A4."""

    def made(kind):
        """An error of a kind, with a made-up value for every argument that has to be given."""
        values = {"int": 418, "str": "told", "bool": True, "dict[str, Any]": {"a": 1}}
        if not inspect.isfunction(kind.__init__):  # it takes what any exception takes
            return kind("told")
        parameters = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
        keywords = {p.name: values.get(str(p.annotation), "told") for p in parameters if p.kind is p.KEYWORD_ONLY}
        positional = [
            values.get(str(p.annotation), "told")
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return kind(*positional or ["told"], **keywords)

    # Every public error of both packages: those whose names and modules have no leading underscore.
    found = set()
    for package in (strands_sglang, strands_env):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if (
                any(part.startswith("_") for part in info.name.split("."))
                or ".scripts" in info.name
                or ".shim" in info.name
            ):
                continue
            try:
                module = importlib.import_module(info.name)
            except ModuleNotFoundError:  # an extra that is not installed
                continue
            found |= {
                kind
                for name, kind in vars(module).items()
                if inspect.isclass(kind) and issubclass(kind, BaseException) and not name.startswith("_")
                if kind.__module__.startswith(("strands_sglang", "strands_env"))
            }
    assert len(found) > 20
    for kind in found:
        error = made(kind)
        there = cross(error)
        assert type(there) is kind
        assert (str(there), there.args, vars(there)) == (str(error), error.args, vars(error))


def raise_http_error(kind):
    raise kind("POST http://x/generate: HTTP 418", status=418, body="tea")


@pytest.mark.parametrize("kind", [SGLangHTTPError, SGLangContextLengthError, SGLangThrottledError])
def test_an_error_in_a_worker_reaches_its_parent_and_breaks_no_pool(kind):
    """A4: such an error broke a process pool, and `multiprocessing.Pool` waited for ever."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        with pytest.raises(kind) as caught:
            pool.submit(raise_http_error, kind).result(timeout=120)
        assert (caught.value.status, caught.value.body) == (418, "tea")
        assert pool.submit(int, "1").result(timeout=120) == 1


def told(trajectory):
    return [
        (
            turn.index,
            turn.status,
            turn.reason,
            list(turn.prompt_ids),
            list(turn.output_ids),
            turn.failure,
            turn.tool_calls,
        )
        for turn in trajectory.turns
    ]


async def test_a_trajectory_crosses_whole(episode, cross):
    """A4."""
    trajectory = episode.trajectory
    there = cross(trajectory)
    assert isinstance(there, Trajectory) and there is not trajectory
    assert told(there) == told(trajectory)
    assert [s.tokens for s in there.sequences()] == [s.tokens for s in trajectory.sequences()]
    assert there.explain() == trajectory.explain()


async def test_turns_stay_parts_of_one_trajectory(episode, cross):
    """A4."""
    turns = cross(episode.trajectory.turns)
    assert told(turns[0].trajectory) == told(episode.trajectory)
    assert all(turn.trajectory is turns[0].trajectory for turn in turns)
    parents = [None if turn.parent is None else turns.index(turn.parent) for turn in turns]
    originals = episode.trajectory.turns
    assert parents == [None if turn.parent is None else originals.index(turn.parent) for turn in originals]


async def test_sequences_cross_with_every_token(episode, cross):
    """A4."""
    for sequence in [*episode.trajectory.sequences(), episode.token_manager]:
        there = cross(sequence)
        assert there.tokens == sequence.tokens and there.segment_info == sequence.segment_info
        assert there.policy_versions == sequence.policy_versions


async def test_a_copy_is_extended_and_leaves_the_original_alone(rollout, cross):
    """A4."""
    server, model = rollout(["One.", "Two."])
    agent = make_agent(model)
    await agent.invoke_async("a")
    original, model.trajectory = model.trajectory, cross(model.trajectory)
    await agent.invoke_async("b")
    assert (len(original), len(model.trajectory)) == (1, 2)
    assert len(model.trajectory.sequences()) == 1


async def test_the_result_of_a_step_crosses(rollout, cross):
    """A4."""
    _, model = rollout(["hello"])
    result = await Environment(model_factory=lambda: model).step(
        Action(message="hi", task_context=TaskContext(id="1", extra={"a": 1}))
    )
    there = cross(result)
    assert there.model_dump() == result.model_dump()
    assert told(there.observation.trajectory) == told(result.observation.trajectory)


async def test_results_of_an_evaluation_cross(tmp_path, cross):
    """A4."""
    results = await Evaluator(StubEnvironment().factory, show_progress=False).run(tasks(2))
    there = cross(results)
    assert {key: [s.model_dump() for s in row] for key, row in there.items()} == {
        key: [s.model_dump() for s in row] for key, row in results.items()
    }


async def test_a_long_episode_crosses_in_a_size_linear_in_its_tokens(rollout, cross):
    """A4: a chain of 400 turns was a RecursionError."""
    _, model = rollout(lambda request: ScriptedAnswer("ok"), server={"context_length": 10**6})
    messages, sizes = [], {}
    for number in range(1, 401):
        messages += [{"role": "user", "content": [{"text": "q"}]}]
        async for _ in model.stream(messages):
            pass
        messages += [{"role": "assistant", "content": [{"text": "ok"}]}]
        if number in (200, 400):
            sizes[number] = len(pickle.dumps(model.trajectory.turns))
    there = cross(model.trajectory.turns)
    assert len(there) == 400 and there[-1].token_ids() == model.trajectory.turns[-1].token_ids()
    assert cross(model.trajectory.turns[-1]).token_ids() == there[-1].token_ids()
    assert sizes[400] < 2.2 * sizes[200]


def test_a_turn_without_a_trajectory_says_that_it_cannot_cross(rollout, cross):
    """A4."""
    turn = strands_sglang.Turn(0, None, "alone", b"", {}, (), (), [])
    with pytest.raises(TypeError, match="part of no trajectory"):
        cross(turn)


# --- files that earlier releases wrote (tests/fixtures, by `support.write_fixtures`) still load, extend and resume ---


RELEASES = sorted(path for path in (Path(__file__).parents[2] / "fixtures").iterdir() if path.is_dir())
of_each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)


def old_told(path):
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "path",
    [path for release in RELEASES for path in sorted(release.glob("trajectories/*.safetensors"))],
    ids=lambda path: f"{path.parent.parent.name}-{path.stem}",
)
def test_an_old_trajectory_reads_as_it_did_when_it_was_written(path, tmp_path):
    def facts(trajectory):
        """What the code at hand reads from a trajectory."""
        return {
            "statuses": [turn.status.value for turn in trajectory.turns],
            "auxiliary": [turn.is_auxiliary for turn in trajectory.turns],
            "sent_ids": [turn.sent_ids() for turn in trajectory.turns],
            "policy_versions": [list(sequence.policy_versions) for sequence in trajectory.sequences()],
            "sequences": [
                {"token_ids": s.token_ids, "loss_mask": s.loss_mask, "logprobs": s.logprobs}
                for s in trajectory.sequences(discarded=True, auxiliary=True)
            ],
            "trained": [sum(sequence.loss_mask) for sequence in trajectory.sequences()],
            "main": trajectory.latest_main_sequence().token_ids,
            "tool_parse_errors": trajectory.tool_parse_errors,
        }

    def same(one, other):
        """NaN equals itself here."""
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        if isinstance(one, list):
            return len(one) == len(other) and all(map(same, one, other))
        return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))

    def as_json(value):
        return json.loads(json.dumps(value))

    expected = old_told(path)
    del expected["messages"]
    loaded = Trajectory.load(path)
    assert same(as_json(facts(loaded)), expected)
    loaded.save(tmp_path / "again")
    assert same(as_json(facts(Trajectory.load(tmp_path / "again"))), expected)


@pytest.mark.parametrize("name", ["tool_loop", "aborts", "helpers"])
@of_each_release
async def test_an_old_trajectory_is_extended(release, name):
    path = release / "trajectories" / f"{name}.safetensors"
    tokenizer = AutoTokenizer.from_pretrained(release / "tokenizer")
    server = ScriptedSGLang(tokenizer, ["More."])
    model = SGLangModel(tokenizer=tokenizer, client=server.client())
    model.trajectory = Trajectory.load(path)
    tools = make_tools()[0] if name == "tool_loop" else None
    await make_agent(model, tools, messages=old_told(path)["messages"]).invoke_async("And more?")
    turn = model.trajectory.turns[-1]
    assert turn.parent is not None
    assert server.requests[0].input_ids[: len(turn.parent.token_ids())] == turn.parent.token_ids()


@of_each_release
async def test_an_old_evaluation_by_the_library_is_resumed(release, tmp_path):
    path = shutil.copytree(release / "library", tmp_path / "out") / "results.jsonl"
    before = {sample["key"]: sample for sample in map(json.loads, path.read_text("utf-8").splitlines()[:-1])}
    stub = StubEnvironment()
    evaluator = Evaluator(stub.factory, show_progress=False, n_samples_per_prompt=2, output_path=path)
    results = await evaluator.run(tasks(4))
    assert {action.task_context.id for action in stub.episodes} <= {"t3"}  # its reward had failed
    for n in range(3):
        assert [sample.step_result.reward.reward for sample in results[f"t{n}"]] == [n % 2] * 2
    assert {key: sample for sample in lines(path) if (key := sample["key"]) in before} == before


@of_each_release
def test_an_old_evaluation_by_the_command_is_resumed(release, tmp_path, monkeypatch):
    # The evaluation in `command/`, run in a folder with `sums.jsonl` and `tokenizer`; `--base-url` comes on top.
    questions = [{"id": f"s{n}", "question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
    command = [
        *("eval", "--dataset", "sums.jsonl", "--env", "calculator", "--backend", "sglang", "--tokenizer", "tokenizer"),
        *("--n-samples", "2", "--concurrency", "1", "--keep-tokens", "--output", "out"),
    ]

    def solve(request):
        """A policy that asks the calculator and is right about every sum but those divisible by three."""
        left, right = map(int, re.findall(r"What is (\d+) \+ (\d+)", request.text)[-1])
        if "<tool_response>" not in request.text:
            return ScriptedAnswer(call("calculator", expression=f"{left} + {right}"))
        return ScriptedAnswer(rf"\boxed{{{left + right if (left + right) % 3 else 0}}}")

    folder = shutil.copytree(release / "command", tmp_path / "run")
    os.symlink(release / "tokenizer", folder / "tokenizer")
    monkeypatch.chdir(folder)
    before = lines(folder / "out" / "results.jsonl")
    server = ScriptedSGLang(AutoTokenizer.from_pretrained(release / "tokenizer"), solve)
    with server.serve() as base_url:
        assert main([*command, "--base-url", base_url]) == 0
    asked = {row["id"] for row in questions for request in server.requests if row["question"] in request.text}
    assert asked == {"s2", "s3"}
    records = lines(folder / "out" / "results.jsonl")
    assert records[: len(before)] == before and len(records) == 2 * len(questions)
    _, results = read_results(folder / "out" / "results.jsonl")
    assert {prompt: len(samples) for prompt, samples in results.items()} == {row["id"]: 2 for row in questions}
