import pytest

from strands_sglang import SGLangDecodingError
from strands_sglang.generation import read_generation


def response(**changes):
    """A `/generate` response in the shape of the real server's."""
    meta = {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "weight_version": "default",
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]],
        "completion_tokens": 2,
        "cached_tokens": 1,
        "e2e_latency": 0.5,
    }
    meta.update(changes.pop("meta", {}))
    return {"text": "x", "output_ids": [7, 2], "meta_info": meta, **changes}


def test_ids_logprobs_and_facts_are_read():
    generation = read_generation(response(), logprobs_expected=True)
    assert generation.output_ids.tolist() == [7, 2]
    assert generation.logprobs.tolist() == [-0.5, -0.25]
    assert generation.stop_token_id == 2
    assert (generation.prompt_tokens, generation.cached_tokens, generation.completion_tokens) == (3, 1, 2)
    assert (generation.weight_version, generation.request_id, generation.latency_s) == ("default", "r1", 0.5)


def test_a_cut_turn_has_no_stop_token():
    cut = response(meta={"finish_reason": {"type": "length", "length": 2}})
    assert read_generation(cut, logprobs_expected=True).stop_token_id is None


def test_a_turn_ended_by_a_stop_string_has_no_stop_token():
    ended = response(meta={"finish_reason": {"type": "stop", "matched": "END"}})
    generation = read_generation(ended, logprobs_expected=True)
    assert (generation.stop_token_id, generation.stop_string) == (None, "END")


def test_an_answer_aborted_in_the_queue_is_read_without_the_keys_it_lacks():
    queued = {
        "text": "",
        "output_ids": [],
        "meta_info": {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    }
    generation = read_generation(queued, logprobs_expected=True)
    assert (generation.completion_tokens, generation.finish_type) == (0, "abort")
    assert generation.abort_message == "Abort in waiting queue"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"text": "x"}, "meta_info"),
        ({"output_ids": [1], "meta_info": {}}, "finish_reason"),
        ({"output_ids": ["a"], "meta_info": {"finish_reason": {"type": "stop"}}}, "wrong type"),
        (response(meta={"output_token_logprobs": None}), "no logprobs"),
        (response(meta={"output_token_logprobs": [[-0.5, 7, None]]}), "2 token ids with 1 logprobs"),
        (response(meta={"output_token_logprobs": [[-0.5, 7, None], [-0.1, 9, None]]}), "other token ids"),
        (response(meta={"output_token_logprobs": [[None, 7, None], [-0.1, 2, None]]}), "not a number"),
        (response(meta={"output_token_logprobs": [[-0.1], [-0.1]]}), "complete"),
        (response(meta={"output_token_logprobs": [None, None]}), "complete"),
        (response(meta={"input_token_logprobs": [None]}), "complete"),
        (response(meta={"e2e_latency": "x"}), "complete"),
        (response(meta={"prompt_tokens": None}), "complete"),
        (response(meta={"finish_reason": {"type": "error", "message": "oom"}}), "unknown finish reason.*oom"),
        (response(meta={"finish_reason": None}), "complete"),
    ],
)
def test_an_incomplete_or_inconsistent_answer_is_refused(broken, message):
    with pytest.raises(SGLangDecodingError, match=message):
        read_generation(broken, logprobs_expected=True)


def test_logprobs_that_were_not_asked_for_may_be_missing():
    assert read_generation(response(meta={"output_token_logprobs": None}), logprobs_expected=False).logprobs is None


@pytest.mark.parametrize(("ends", "stop"), [((2,), 2), ((), None)])
def test_a_stop_without_its_token_is_recognised_by_the_tokens_that_end_turns(ends, stop):
    silent = response(meta={"finish_reason": {"type": "stop", "matched": None}})
    assert read_generation(silent, logprobs_expected=True, end_token_ids=ends).stop_token_id == stop
