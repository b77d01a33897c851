import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang import Rollout, Segment, Token, TokenManager

token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)


def test_prompt_tokens_have_mask_zero_and_responses_mask_one():
    tm = TokenManager()
    tm.add_prompt([1, 2, 3])
    tm.add_response([4, 5], [-0.1, -0.2])
    tm.add_prompt([6], [0.0])

    assert tm.token_ids == [1, 2, 3, 4, 5, 6]
    assert tm.loss_mask == [0, 0, 0, 1, 1, 0]
    assert tm.logprobs == [None, None, None, -0.1, -0.2, 0.0]
    assert len(tm) == 6


def test_segments_are_sequences_of_tokens():
    tm = TokenManager()
    tm.add_prompt([1, 2])
    tm.add_response([3], [-0.5])

    assert len(tm.segments[0]) == 2
    assert list(tm.segments[1]) == [Token(3, -0.5, True)]
    assert tm.segments[1] == [Token(3, -0.5, True)]
    assert tm.segments[0][1] == Token(2, None, False)
    assert tm.segments[0][0:2] == [Token(1, None, False), Token(2, None, False)]
    assert tm.segment_info == [(False, 2), (True, 1)]
    assert tm.tokens == [Token(1, None, False), Token(2, None, False), Token(3, -0.5, True)]


def test_the_opening_prompt_is_the_first_segment():
    tm = TokenManager()
    assert (tm.initial_prompt, tm.initial_prompt_length, tm.segments) == ([], 0, [])
    tm.add_prompt([7, 8])
    assert tm.initial_prompt_length == 2
    assert [token.token_id for token in tm.initial_prompt] == [7, 8]


def test_a_sequence_cannot_begin_with_a_response():
    with pytest.raises(RuntimeError, match="first segment"):
        TokenManager().add_response([1], [-0.1])


def test_logprobs_of_another_length_are_refused_and_nothing_is_added():
    tm = TokenManager()
    tm.add_prompt([1])
    with pytest.raises(ValueError, match="2 token ids came with 1 logprobs"):
        tm.add_response([2, 3], [-0.1])
    assert len(tm) == 1


def test_a_prompt_cannot_be_trained_on():
    with pytest.raises(ValueError, match="did not sample"):
        Segment([1], is_response=False, loss_mask=1)


def test_empty_segments_are_left_out():
    tm = TokenManager()
    tm.add_prompt([])
    assert tm.segments == []
    tm.add_prompt([1])
    tm.add_response([], [])
    assert tm.segment_info == [(False, 1)]


def test_reset_forgets_everything():
    tm = TokenManager()
    tm.add_prompt([1])
    tm.reset()
    assert (len(tm), tm.token_ids, tm.segments) == (0, [], [])


def test_tokens_are_frozen():
    token = Token(1, -0.5, True)
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        token.logprob = 0.0
    assert (token.token_id, token.logprob, token.loss_mask) == (1, -0.5, True)


def test_what_is_handed_out_is_a_copy():
    tm = TokenManager()
    tm.add_prompt([1, 2])
    tm.token_ids.append(9)
    tm.segments.clear()
    tm.segments[0].token_ids.append(9)
    assert tm.token_ids == [1, 2]


def test_rollout_is_a_second_name():
    assert Rollout is TokenManager


@pytest.mark.parametrize("bad", [["1"], [1.5], [None]])
def test_ids_that_are_no_ints_are_refused(bad):
    with pytest.raises(TypeError):
        TokenManager().add_prompt(bad)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 2**31 - 1), logprobs), min_size=1, max_size=6)))
)
def test_everything_added_is_read_back_exactly(parts):
    tm = TokenManager()
    tm.add_prompt([0])
    expected = [(0, None, 0)]
    for is_response, tokens in parts:
        ids, values = [token for token, _ in tokens], [value for _, value in tokens]
        if is_response:
            tm.add_response(ids, values)
            expected += [(token, value, 1) for token, value in tokens]
        else:
            tm.add_prompt(ids)
            expected += [(token, None, 0) for token in ids]

    assert list(zip(tm.token_ids, tm.logprobs, tm.loss_mask, strict=True)) == expected
    assert [tuple(token) for token in tm.tokens] == [(i, lp, bool(mask)) for i, lp, mask in expected]
    assert sum(length for _, length in tm.segment_info) == len(tm)
