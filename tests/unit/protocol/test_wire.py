from array import array

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.exceptions import SGLangDecodingError
from strands_sglang.protocol.wire import decode_generation, encode_generate, encode_token_ids, error_message

NOT_AN_ID = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(), st.lists(st.integers()), st.integers(max_value=-1), st.binary()
)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_every_list_of_ids_is_encoded_as_it_is(ids):
    assert orjson.loads(encode_token_ids(ids)) == ids
    assert orjson.loads(encode_token_ids(tuple(ids), max(ids) + 1)) == ids
    assert orjson.loads(encode_token_ids(array("q", ids))) == ids


@given(st.lists(st.integers(0, 999)), NOT_AN_ID, st.lists(st.integers(0, 999)))
def test_whatever_is_not_an_id_is_refused_with_its_index(before, bad, after):
    with pytest.raises(ValueError, match=rf"^input_ids\[{len(before)}\] is "):
        encode_token_ids([*before, bad, *after])


@given(st.lists(st.integers(0, 2000), min_size=1), st.integers(1, 2000))
def test_ids_outside_the_vocabulary_are_refused(ids, vocab_size):
    outside = [index for index, token_id in enumerate(ids) if token_id >= vocab_size]
    if not outside:
        assert orjson.loads(encode_token_ids(ids, vocab_size)) == ids
        return
    with pytest.raises(ValueError, match=rf"input_ids\[{outside[0]}\] is {ids[outside[0]]} .*below {vocab_size}"):
        encode_token_ids(ids, vocab_size)


@given(st.text(), st.dictionaries(st.text(), st.integers(-(2**53), 2**53)))
def test_a_request_id_is_added_whatever_is_in_it_and_in_the_body(rid, sampling):
    sampling.pop("n", None)
    try:
        body = encode_generate([1], sampling, {"rid": "prefix", "k": 1})
        full = body.with_rid(rid)
    except (ValueError, TypeError):  # lone surrogates have no UTF-8
        return
    assert orjson.loads(full) == {
        "rid": rid,
        "input_ids": [1],
        "sampling_params": sampling,
        "k": 1,
        "stream": False,
    }


@given(st.binary())
def test_a_body_is_a_generation_or_a_decoding_error_that_names_the_url(body):
    with pytest.raises(SGLangDecodingError, match="http://h/generate answered"):
        decode_generation(body, "http://h/generate")


ERROR_KEYS = st.sampled_from(["error", "message", "code", "detail", "x"])


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(ERROR_KEYS, inner)
    )
)
def test_an_error_body_of_any_shape_gives_a_message(body):
    assert isinstance(error_message(orjson.dumps(body).decode()), str)
