"""What of the TRL adapter needs no trainer; tests/trainers/trl has the rest."""

import asyncio
import queue
import signal
import threading
from array import array
from dataclasses import make_dataclass
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file

from strands_sglang import SGLangConnectionError, SGLangHTTPError
from strands_sglang.credit import Episode, training_rows
from strands_sglang.messages.content import Picture
from strands_sglang.templates.image_tokens import ImageInputs
from strands_sglang.trainers import areal, skyrl, tinker
from strands_sglang.trainers.trl import AsyncGRPORollouts, GRPORollouts, SGLangWeights, row_advantages
from support.agents import user
from support.recorder import Recorder

TENSORS = [("weight", torch.zeros(3))]

pytestmark = pytest.mark.respx(using="httpx")  # above the default transport, which is aiohttp's


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            httpx.Response(400, json={"success": False, "message": "shape mismatch"}),
            "http://two/update_.*shape mismatch",
        ),
        (
            httpx.Response(200, json={"success": False, "message": "shape mismatch"}),
            "http://two/update_.*shape mismatch",
        ),
        (httpx.Response(500, text="died"), "http://two/update_.*died"),
    ],
)
def test_weights_that_a_server_refuses_raise(respx_mock, refusal, message):
    respx_mock.post(path="/begin_weight_update").respond(404)
    ended = respx_mock.post(path="/end_weight_update").respond(404)
    respx_mock.post("http://one/update_weights_from_tensor").respond(json={"success": True})
    respx_mock.post("http://two/update_weights_from_tensor").mock(return_value=refusal)
    with pytest.raises(SGLangHTTPError, match=message):
        SGLangWeights(["http://one/", "http://two"]).push(TENSORS, 1)
    assert ended.call_count == 2


def test_the_first_error_of_an_update_is_raised(respx_mock):
    for path in ("/pause_generation", "/flush_cache", "/begin_weight_update"):
        respx_mock.post(path=path).respond(json={})
    respx_mock.post("http://one/update_weights_from_tensor").respond(400, text="shape mismatch")
    for path in ("/end_weight_update", "/continue_generation"):
        respx_mock.post(path=path).respond(500, text="no update has begun")
    weights = SGLangWeights("http://one")
    with pytest.raises(SGLangHTTPError, match="shape mismatch"):
        weights.push(TENSORS, 1)
    with pytest.raises(SGLangHTTPError, match="shape mismatch"):
        GRPORollouts(None, group_size=2, weights=weights)([], grpo_trainer())
    respx_mock.post("http://one/update_weights_from_tensor").respond(json={})
    with pytest.raises(SGLangHTTPError, match="no update has begun"):
        weights.push(TENSORS, 2)


def grpo_trainer(processes=1):
    settings = {"scale_rewards": "none", "num_iterations": 1, "loss_type": "dapo"}
    steps = {
        "num_generations": 4,
        "num_generations_eval": None,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "mask_truncated_completions": False,
        "beta": 0.0,
        "max_completion_length": 100,
    }
    return SimpleNamespace(
        args=make_dataclass("Settings", {**settings, **steps})(**settings, **steps),
        reward_funcs=[row_advantages],
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(num_processes=processes, unwrap_model=lambda model: model),
        model=torch.nn.Linear(2, 2),
        processing_class=SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=0)),  # as of a model with images
    )


def test_several_processes_are_refused():
    with pytest.raises(ValueError, match="2 processes would each weight only their own rows"):
        GRPORollouts(None, group_size=2)([], grpo_trainer(processes=2))


@pytest.mark.parametrize("dead", ["one", "two"])
def test_no_server_stays_paused_when_another_dies(respx_mock, dead):
    respx_mock.route(host=dead).mock(side_effect=httpx.ConnectError("refused"))
    alive = respx_mock.route(host="one" if dead == "two" else "two").respond(json={"success": True})
    weights = SGLangWeights(["http://one", "http://two"])
    with pytest.raises(SGLangConnectionError, match=f"http://{dead}/.*could not connect"):
        GRPORollouts(None, group_size=2, weights=weights)([], grpo_trainer())
    assert alive.calls[-1].request.url.path == "/continue_generation"
    worker = AsyncGRPORollouts(None, [], weights)  # AsyncGRPOTrainer resumes only after success, but destroys always
    with pytest.raises(SGLangConnectionError, match=f"http://{dead}/.*could not connect"):
        worker.pause()
    worker.destroy()
    assert [call.request.url.path for call in alive.calls[-2:]] == ["/pause_generation", "/continue_generation"]


def test_an_unreadable_answer_keeps_no_server_from_the_request(respx_mock):
    content = {"content-type": "application/json"}
    respx_mock.post("http://one/continue_generation").respond(502, text="<html>bad gateway", headers=content)
    other = respx_mock.post("http://two/continue_generation").respond(text="ok", headers=content)
    with pytest.raises(SGLangHTTPError, match="bad gateway"):
        SGLangWeights(["http://one", "http://two"]).resume()
    assert other.called


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.base_layer.weight",
        "model.layers.0.self_attn.q_proj.lora_A.default.weight",
    ],
)
def test_weights_of_an_adapter_are_refused_before_any_request(name, respx_mock):
    weights = SGLangWeights("http://one")
    with pytest.raises(ValueError, match="push the merged weights"):
        weights.push([*TENSORS, (name, torch.zeros(1))], 1)
    assert not respx_mock.calls


def test_every_request_has_the_headers(respx_mock):
    route = respx_mock.post(host="one").respond(json={"success": True})
    weights = SGLangWeights("http://one", headers={"Authorization": "Bearer key"})
    weights.pause()
    weights.push(TENSORS, 1)
    weights.resume()
    assert route.call_count == 6
    assert {call.request.headers["authorization"] for call in route.calls} == {"Bearer key"}


def test_weights_are_pushed_to_idle_servers(respx_mock):
    server = respx_mock.route(host="one").respond(json={"success": True})
    weights = SGLangWeights("http://one", timeout=20)
    weights.pause()
    weights.push(TENSORS, 1)
    calls = [call.request.url for call in server.calls]
    assert [url.path for url in calls[:2]] == ["/pause_generation", "/flush_cache"]
    assert float(calls[1].params["timeout"]) > 0


def test_a_folder_needs_the_model_it_is_copied_from(tmp_path):
    with pytest.raises(ValueError, match="model_path and folder belong together"):
        SGLangWeights("http://localhost:1", folder=tmp_path)


def test_tied_weights_are_written_under_both_names(respx_mock, tmp_path):
    respx_mock.post("http://one/update_weights_from_disk").respond(json={"success": True})
    (tmp_path / "model").mkdir()
    embedding = torch.arange(6.0)
    paths = {"model_path": tmp_path / "model", "folder": tmp_path / "pushed"}
    SGLangWeights("http://one", **paths).push([("embed", embedding), ("head", embedding), ("other", -embedding)], 1)
    written = load_file(tmp_path / "pushed" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        "embed": embedding.tolist(),
        "head": embedding.tolist(),
        "other": (-embedding).tolist(),
    }


def test_rollouts_are_late_by_what_the_trainer_waits(monkeypatch):
    now = 0.0
    monkeypatch.setattr("strands_sglang.trainers.trl.time", SimpleNamespace(monotonic=lambda: now))
    rollouts = AsyncGRPORollouts(None, ["x"], None, groups_in_flight=0)
    rollouts.start()
    try:
        now = 1000.0  # the trainer was busy until now
        for waited in (0, 299):
            now = 1000.0 + waited
            with pytest.raises(queue.Empty):
                rollouts.rollout_buffer.get(block=False)
            rollouts.check_health(300)
        now = 1301.0
        with pytest.raises(RuntimeError, match="no row to train for 300 s"):
            rollouts.check_health(300)
    finally:
        rollouts.stop()


def test_staleness_is_that_of_the_episode_although_another_group_has_one_of_its_id():
    rollouts = AsyncGRPORollouts(None, [], None, max_staleness=1, version=5)
    for group, version in enumerate([5, 1, 4, 2]):
        rollouts.rollout_buffer.put(
            (SimpleNamespace(group_id=group, model_version=version), SimpleNamespace(episode="0"))
        )
    assert [rollouts.rollout_buffer.get(block=False).model_version for _ in range(2)] == [5, 4]
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get(block=False)
    assert rollouts.left_out == {"older than max_staleness=1": 2}


def test_a_row_that_is_being_taken_is_no_room_for_another_prompt():
    has_started = threading.Event()

    def prompts():
        has_started.set()
        yield "x"

    class Version(int):
        def __rsub__(self, version):
            has_started.wait(0.5)  # while the trainer takes the row
            return version - int(self)

    rollouts = AsyncGRPORollouts(None, prompts(), None, max_staleness=1, rows_per_step=2, group_size=2)
    for number in range(2):
        sample = SimpleNamespace(group_id=0, model_version=Version(0))
        rollouts.rollout_buffer.put((sample, SimpleNamespace(episode=str(number))))
    rollouts.start()
    try:
        rollouts.rollout_buffer.get(block=False)
        assert not has_started.is_set()
    finally:
        rollouts.stop()


def test_the_room_for_prompts_counts_the_rows_of_their_trees():
    rollouts = AsyncGRPORollouts(None, [], None, rows_per_step=8, group_size=2, groups_in_flight=9, rows_per_episode=2)
    assert [rollouts._has_room(groups) for groups in range(4)] == [True, True, False, False]
    rollouts.next_step(groups=1)
    assert [rollouts._has_room(groups) for groups in range(2)] == [True, False]


def grpo_rows(episodes):
    left = iter(episodes)

    async def run_episode(prompt):
        return next(left)

    return GRPORollouts(run_episode, group_size=2)(["x"] * 4, grpo_trainer())


def in_a_notebook(work):
    """Call `work` where a loop runs, as a cell does. Ctrl-C raises: `asyncio.run` would cancel the cell."""

    async def cell():
        return work()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def test_rollouts_run_in_a_notebook():
    recorders = Recorder(), Recorder()
    for recorder in recorders:
        recorder.call([user("q")], "a")
    episodes = [Episode(one.trajectory, reward, "g") for one, reward in zip(recorders, (0.0, 1.0), strict=True)]
    rows = in_a_notebook(lambda: grpo_rows(episodes))
    assert rows == grpo_rows(episodes) and sum(map(sum, rows["env_mask"])) == 4


def test_ctrl_c_in_a_notebook_ends_the_rollouts():
    begun, ended = [], []

    async def run_episode(prompt):
        begun.append(prompt)
        if len(begun) == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(prompt)

    with pytest.raises(KeyboardInterrupt):
        in_a_notebook(lambda: GRPORollouts(run_episode, group_size=2)(["x"] * 4, grpo_trainer()))
    assert ended == ["x", "x"]


@pytest.mark.parametrize(
    "train",
    [
        grpo_rows,
        lambda episodes: tinker.to_data(training_rows(episodes)),
        lambda episodes: areal.to_batch(training_rows(episodes)),
        lambda episodes: skyrl.generator_output(episodes, [SimpleNamespace(instance_id="i")] * 2),
    ],
    ids=["trl", "tinker", "areal", "skyrl"],
)
def test_trainers_of_token_ids_refuse_images(train):
    episodes = []
    for reward in (0.0, 1.0):
        recorder = Recorder()
        turn = recorder.call([user("q")], "a")
        turn.images = ImageInputs((Picture(b"", "png", "q"),), array("i", [1]), {"pixel_values": torch.zeros(1, 3)})
        episodes.append(Episode(recorder.trajectory, reward, "g"))
    with pytest.raises(ValueError, match="has images, but .* has token ids only: train it with slime"):
        train(episodes)
