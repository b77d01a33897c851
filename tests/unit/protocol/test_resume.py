import base64
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang import SGLangDecodingError
from strands_sglang.protocol.generation import join_parts, read_generation, sampling_params_of_the_rest

WIDTH = 2
PROMPT = 3


def experts(version, start, end):
    """Rows of routed experts that tell which weights routed which token."""
    rows = [[version, position] for position in range(start, end)]
    return base64.b64encode(b"".join(struct.pack(f"<{WIDTH}i", *row) for row in rows)).decode()


def part(ids, *, before=0, version=0, finish="abort", rid="r", **changes):
    """What a request returned that went on behind `before` sampled tokens."""
    rows = PROMPT + before + len(ids) - 1
    meta = {
        "id": rid,
        "finish_reason": {"type": finish, "message": "Aborted", "matched": ids[-1] if ids else None},
        "prompt_tokens": PROMPT + before,
        "cached_tokens": before,
        "weight_version": str(version),
        "weight_versions": [{"version": str(version), "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-float(token_id), token_id, None] for token_id in ids],
        "routed_experts": experts(version, 0, rows),
        "e2e_latency": 1.0,
        **changes,
    }
    return read_generation({"output_ids": ids, "meta_info": meta}, logprobs_expected=True)


def queued(rid="q"):
    meta = {"id": rid, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_versions": []}
    return read_generation({"output_ids": [], "meta_info": meta}, logprobs_expected=True)


def test_the_parts_of_an_answer_are_joined_with_what_each_token_was_sampled_with():
    joined = join_parts(
        [part([11, 12], rid="a"), queued("b"), part([13, 2], before=2, version=1, finish="stop", rid="c")]
    )
    assert joined.output_ids.tolist() == [11, 12, 13, 2]
    assert joined.logprobs.tolist() == [-11, -12, -13, -2]
    assert (joined.finish_type, joined.stop_token_id, joined.latency_s) == ("stop", 2, 2.0)
    assert joined.weight_versions == (("0", 0, 2), ("1", 2, 4))
    assert (joined.prompt_tokens, joined.cached_tokens) == (PROMPT, 0)
    assert (joined.resumed_ids, joined.request_id) == (("a", "b"), "c")


def test_experts_of_the_tokens_before_an_abort_stay_those_of_the_weights_that_sampled_them():
    joined = join_parts([part([11, 12]), part([13, 2], before=2, version=1, finish="stop")])
    # The row behind the last token before the abort was made by the new weights: the old ones never saw it.
    assert joined.expert_ids().tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 4], [1, 5]]


@given(st.lists(st.integers(3, 90), min_size=1, max_size=12), st.lists(st.integers(0, 12), max_size=5))
def test_wherever_an_answer_is_aborted_the_joined_one_is_the_whole_one(ids, cuts):
    bounds = [0, *sorted(min(cut, len(ids) - 1) for cut in cuts), len(ids)]
    parts = [
        part(ids[start:end], before=start, finish="stop" if last else "abort")
        for start, end, last in zip(bounds[:-1], bounds[1:], [*[False] * len(cuts), True], strict=True)
    ]
    whole, joined = part(ids, finish="stop"), join_parts(parts)
    for name in ("output_ids", "logprobs", "prompt_tokens", "cached_tokens", "weight_versions", "routed_experts"):
        assert getattr(joined, name) == getattr(whole, name), name


def test_an_answer_in_one_part_stays_as_it_is():
    whole = part([11, 2], finish="stop")
    assert join_parts([whole]) is whole
    with pytest.raises(ValueError, match="at least one part"):
        join_parts([])


def test_answers_that_were_all_aborted_in_the_queue_are_empty():
    joined = join_parts([queued("a"), queued("b")])
    assert (joined.output_ids.tolist(), joined.prompt_tokens, joined.finish_type) == ([], 0, "abort")
    assert joined.resumed_ids == ("a",)


def test_parts_whose_experts_do_not_fit_together_are_refused():
    other = part([13, 2], before=2, finish="stop", routed_experts=base64.b64encode(bytes(4 * 3 * 6)).decode())
    with pytest.raises(SGLangDecodingError, match="routed experts"):
        join_parts([part([11, 12]), other])


def test_tokens_whose_experts_are_lost_are_not_joined_with_others():
    with pytest.raises(SGLangDecodingError, match="without its routed experts"):
        join_parts([part([11, 12], routed_experts=None), part([13, 2], before=2, finish="stop")])


def test_what_is_left_of_a_budget_is_asked_for():
    params = {"max_new_tokens": 10, "min_new_tokens": 3, "temperature": 0.5}
    assert sampling_params_of_the_rest(params, 4) == {"max_new_tokens": 6, "min_new_tokens": 0, "temperature": 0.5}
    assert sampling_params_of_the_rest({"min_new_tokens": None}, 0) == {"min_new_tokens": None}


def test_a_request_without_a_budget_has_the_servers_over_all_parts():
    assert sampling_params_of_the_rest({}, 100) == {"max_new_tokens": 28}
    assert sampling_params_of_the_rest({}, 300) == {}  # that server has another one


def top_p(*counts):
    """What slime's SGLang tells of tokens for which top-p kept so many ids."""
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return {"top_p_token_ids": list(range(offsets[-1])), "top_p_token_offsets": offsets}


def test_the_ids_that_top_p_kept_are_joined():
    first, second = part([11, 12], **top_p(2, 1)), part([13, 2], before=2, finish="stop", **top_p(1, 3))
    mask = join_parts([first, queued(), second]).kept_ids()
    assert list(mask.rows()) == [[0, 1], [2], [0], [1, 2, 3]]


def test_tokens_of_a_part_that_told_none_have_none():
    joined = join_parts([part([11, 12]), part([13, 2], before=2, finish="stop", **top_p(1, 3))])
    assert list(joined.kept_ids().rows()) == [[], [], [0], [1, 2, 3]]
    assert join_parts([part([11, 12]), part([13, 2], before=2, finish="stop")]).kept_ids() is None


def sampled_from(*rows):
    """What stock SGLang tells of tokens that were sampled from these ids."""
    return {
        "output_token_sampling_mask": list(rows),
        "output_token_sampling_logprobs": [-float(len(row)) for row in rows],
        "output_token_sampling_mask_length": len(rows),
    }


def test_sampling_masks_and_their_logprobs_are_joined_token_by_token():
    """Item 6: what an aborted part lacks is unknown for its tokens, and the others keep theirs."""
    parts = [
        part([11, 12], **sampled_from([11, 5], [12])),
        queued(),
        part([7], before=2),
        part([13, 2], before=3, finish="stop", **sampled_from([13], [9, 2, 3])),
    ]
    joined = join_parts(parts)
    assert list(joined.sampling_mask.rows()) == [[11, 5], [12], [], [13], [9, 2, 3]]
    assert joined.sampling_logprobs[:2].tolist() == [-2.0, -1.0] and math.isnan(joined.sampling_logprobs[2])
    assert joined.sampling_logprobs[3:].tolist() == [-1.0, -3.0]
    again = join_parts([parts[0], join_parts(parts[1:])])
    assert (again.sampling_mask, len(again.sampling_logprobs)) == (joined.sampling_mask, 5)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"output_token_sampling_mask": [[11]]}, "2 token ids with 1 sampling masks"),
        ({"output_token_sampling_mask": [[11], [3]]}, "token 1 lacks 12"),
        ({"output_token_sampling_mask": [[11], None]}, "complete"),
        ({"output_token_sampling_mask": [[11], [12, "x"]]}, "complete"),
        ({"output_token_sampling_logprobs": [0.0]}, "2 token ids with 1 sampling logprobs"),
        ({"output_token_sampling_logprobs": [[0.0], [0.0]]}, "not a number"),
    ],
)
def test_sampling_masks_that_are_not_those_of_the_tokens_are_refused(told, message):
    with pytest.raises(SGLangDecodingError, match=message):
        part([11, 12], **told)
