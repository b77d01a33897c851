"""Whatever a server sends, a disk returns or a hook plans, it is used as it is or refused, and nothing is lost."""

import asyncio
import base64
import copy
import struct
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from strands_sglang import SGLangDecodingError, SGLangModel, Trajectory
from strands_sglang.protocol.generation import read_generation
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trajectory.storage import TrajectoryFileError
from support.agents import assistant, user
from support.recorder import Recorder

PROMPT_IDS, OUTPUT_IDS = [5, 6, 9], [7, 2]
ANSWER = {
    "text": "x",
    "output_ids": OUTPUT_IDS,
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}],
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-0.25, 9, None]],
        "output_token_logprobs": [[-1.0, 7, None], [-0.5, 2, None]],
        "output_token_sampling_mask": [[7, 1], [2]],
        "output_token_sampling_logprobs": [-0.5, -0.25],
        "routed_experts": base64.b64encode(struct.pack("<8i", *range(8))).decode(),
        "top_p_token_ids": [1, 2],
        "top_p_token_offsets": [0, 1, 2],
        "e2e_latency": 0.5,
    },
}
JSON_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-3, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "NaN", "Infinity", "1", "stop", "length", "abort", "AAAA"])
)


def nested(leaves):
    return st.recursive(
        leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner), max_leaves=5
    )


def places_in(value, way=()):
    """Yield the path of every value in a JSON document, without the document itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        yield (*way, key)
        yield from places_in(entry, (*way, key))


@st.composite
def changed_answers(draw):
    answer = copy.deepcopy(ANSWER)
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from(list(places_in(answer))))
        holder = answer
        for key in way:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = draw(nested(JSON_LEAVES))
        else:
            del holder[last]
    return answer


@settings(max_examples=150)
@given(changed_answers(), st.booleans())
def test_an_answer_is_recorded_as_it_was_sent_or_refused(answer, logprobs_expected):
    try:
        generation = read_generation(answer, logprobs_expected=logprobs_expected, prompt_ids=PROMPT_IDS, vocab_size=100)
    except SGLangDecodingError:
        return
    recorder = Recorder()
    turn = recorder.ask([user("q")], prompt=PROMPT_IDS)
    recorder.trajectory.answer(turn, generation, assistant("x"))
    (loaded,) = Trajectory.from_bytes(recorder.trajectory.to_bytes()).turns
    assert loaded.output_ids.tolist() == answer["output_ids"]
    for name in ("logprobs", "finish_type", "stop_token_id", "stop_string", "weight_versions", "routed_experts"):
        assert getattr(loaded.generation, name) == getattr(generation, name)
    if loaded.generation.logprobs is not None:
        assert loaded.generation.logprobs == array("d", [e[0] for e in answer["meta_info"]["output_token_logprobs"]])


@pytest.fixture(scope="module")
def content():
    recorder = Recorder()
    history = [user("q")]
    recorder.call(history, "a")
    recorder.call([*history, assistant("a"), user("r")], "b")
    recorder.trajectory.note_end(outcome="task_complete", reward=1.0)
    return recorder.trajectory.to_bytes()


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_file_is_refused_with_its_name(content, tmp_path_factory, data):
    header = 8 + int.from_bytes(content[:8], "little")
    start = data.draw(st.integers(0, header) | st.integers(0, len(content)))
    stop = data.draw(st.integers(start, start + 9) | st.just(len(content)))
    damaged = content[:start] + data.draw(st.binary(max_size=9)) + content[stop:]
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damaged)
    if damaged == content:
        return
    with pytest.raises(TrajectoryFileError) as refused:
        Trajectory.load(path)
    assert str(refused.value).startswith(f"{path}: ")
    try:
        Trajectory.from_bytes(damaged, name="shown", changed_too=True)
    except TrajectoryFileError as error:
        assert str(error).startswith("shown: ")


PLANNED = nested(JSON_LEAVES | st.floats() | st.sampled_from([2**70, "\ud800", b"x", {1}]))
PARAMETERS = st.sampled_from(["max_new_tokens", "temperature", "stop", "sampling_seed", "min_new_tokens", "unknown"])
FIELDS = st.sampled_from(["return_logprob", "rid", "stream", "input_ids", "priority", "unknown"])


@settings(max_examples=150)
@given(
    st.dictionaries(PARAMETERS, PLANNED, max_size=2), st.dictionaries(FIELDS, PLANNED, max_size=1), PLANNED, st.data()
)
def test_a_plan_is_sent_or_refused_and_the_episode_can_be_saved(chatml_tokenizer, params, fields, other, data):
    server = ScriptedSGLang(chatml_tokenizer, ["hello"])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client(max_retries=0))

    def plan_otherwise(turn, plan):
        edited = replace(plan, sampling_params={**plan.sampling_params, **params}, fields={**plan.fields, **fields})
        replaced = data.draw(st.sampled_from([None, "sampling_params", "fields", "clamped", "sampled"]))
        return edited if replaced is None else replace(edited, **{replaced: other})

    async def ask():
        async for _ in model.stream([user("q")]):
            pass

    model.on_request = plan_otherwise
    try:
        asyncio.run(ask())
    except Exception:
        assert [turn.status.value for turn in model.trajectory.turns] == ["failed"]
    else:
        (request,) = server.requests
        assert model.trajectory.turns[0].sampling_params == request.sampling_params
    assert len(Trajectory.from_bytes(model.trajectory.to_bytes())) == 1
