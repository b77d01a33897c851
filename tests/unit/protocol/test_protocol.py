"""SGLang's responses: what is read from them, and how their arrays are packed."""

import base64
import json
import math
import struct
from array import array

import orjson
import pytest
from hypothesis import given, strategies as st

from strands_sglang import SGLangDecodingError
from strands_sglang.protocol.generation import join_parts, read_generation, sampling_params_of_the_rest
from strands_sglang.protocol.wire import (
    FLAT_LOGPROBS,
    EncodedIds,
    decode_generation,
    encode_generate,
    encode_token_ids,
    error_message,
)

# === generation ===


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


@pytest.mark.parametrize(
    ("finish", "stop_string"),
    [
        ({"type": "length", "length": 2}, None),
        ({"type": "stop", "matched": "END"}, "END"),
        ({"type": "stop", "matched": "2"}, "2"),
    ],
)
def test_a_turn_that_a_token_does_not_end_has_no_stop_token(finish, stop_string):
    generation = read_generation(response(meta={"finish_reason": finish}), logprobs_expected=True)
    assert (generation.stop_token_id, generation.stop_string) == (None, stop_string)


QUEUED = {
    "text": "",
    "output_ids": [],
    "meta_info": {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
}


def test_response_aborted_in_the_queue_may_lack_keys():
    generation = read_generation(QUEUED, logprobs_expected=True)
    assert (generation.completion_tokens, generation.finish_type) == (0, "abort")
    assert generation.abort_message == "Abort in waiting queue"
    assert (generation.routed_rows, generation.expert_ids()) == (0, None)


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
        (response(meta={"e2e_latency": "NaN"}), "e2e_latency is nan"),
        (response(meta={"prompt_tokens": None}), "complete"),
        (response(meta={"weight_version": {}}), "weight_version is {}"),
        (response(output_ids=[-1, 2], meta={"output_token_logprobs": [[-1, -1, None], [-1, 2, None]]}), "no id"),
        (response(output_ids=[True, 2], meta={"output_token_logprobs": [[-1, 1, None], [-1, 2, None]]}), "no id"),
        (response(meta={"finish_reason": {"type": "stop", "matched": ""}}), "unknown finish reason"),
        (response(meta={"finish_reason": {"type": "error", "message": "oom"}}), "unknown finish reason.*oom"),
        (response(meta={"finish_reason": None}), "complete"),
    ],
)
def test_incomplete_or_inconsistent_response_is_rejected(broken, message):
    with pytest.raises(SGLangDecodingError, match=message):
        read_generation(broken, logprobs_expected=True)


def test_a_version_that_is_a_number_is_recorded_as_text():
    generation = read_generation(response(meta={"weight_version": 3}), logprobs_expected=True)
    assert (generation.weight_version, generation.weight_versions[0].version) == ("3", "3")


def test_prompt_logprobs_are_those_of_the_prompt():
    def read(reported, vocab_size=100, **facts):
        scored = response(meta={"input_token_logprobs": [[None, 5, None], [-0.5, reported, None]]})
        return read_generation(scored, logprobs_expected=True, prompt_ids=[4, 5, 9], vocab_size=vocab_size, **facts)

    assert read(9).prompt_logprobs.tolist()[1] == -0.5
    for other in (5, 0, None, "9"):
        with pytest.raises(SGLangDecodingError, match=f"of token {other!r} where 9 was sent"):
            read(other)
    assert len(read(0, vocab_size=10).prompt_logprobs) == 2  # SGLang's id of the last one of the vocabulary
    assert math.isnan(read(0, has_images=True).prompt_logprobs[1])  # SGLang's id of an image's placeholder


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1)
ENTRIES = (
    NUMBERS | st.none() | st.booleans() | st.sampled_from(["", "],[", '"', "\\", "output_token_logprobs"]) | st.text()
)
ROW = st.tuples(NUMBERS, st.integers(0, 2**31 - 1), st.none()).map(list)
ROWS = st.lists(ROW, max_size=6) | st.lists(ROW | st.lists(ENTRIES, max_size=4), max_size=6)
ENDS = ("stop", "length", "abort")
PLACES = st.sampled_from(["output_token_logprobs", '\\"output_token_logprobs', "a"])


OTHERS = st.dictionaries(PLACES | st.text(max_size=3), ROWS | ENTRIES, max_size=3)


@given(ROWS | ENTRIES, OTHERS, st.text(), st.data())
def test_flat_logprobs_equal_what_orjson_reads(rows, others, text, data):
    meta = {**others, "output_token_logprobs": rows, "finish_reason": {"type": data.draw(st.sampled_from(ENDS))}}
    answer = {"text": text + '"output_token_logprobs":[[1,2,null]]', **others, "output_ids": [1], "meta_info": meta}
    dump = data.draw(st.sampled_from([orjson.dumps, lambda value: json.dumps(value).encode()]))
    body = dump(answer)
    flat = decode_generation(body, "u", flat_logprobs=True)
    plain = decode_generation(body, "u")
    for place in (flat, flat["meta_info"]):
        values = place.pop(FLAT_LOGPROBS, None)
        if values is not None:
            place["output_token_logprobs"] = [values[i : i + 3] for i in range(0, len(values), 3)]
    assert orjson.dumps(flat, option=orjson.OPT_SORT_KEYS) == orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)


def test_flat_logprobs_are_those_of_complete_answers():
    def is_flat(meta):
        return (
            FLAT_LOGPROBS
            in decode_generation(json.dumps(response(meta=meta)).encode(), "u", flat_logprobs=True)["meta_info"]
        )

    assert is_flat({})
    assert not is_flat({"finish_reason": {"type": "abort", "message": "m"}})
    assert not is_flat({"output_token_logprobs": [[-0.5, 7, " a"], [-0.25, 2, " b"]]})


def test_the_logprobs_of_another_object_stay_as_they_are():
    other = {"output_token_logprobs": [[-1.0, 3, None]]}
    meta = {"customized_info": other, **response()["meta_info"]}
    decoded = decode_generation(
        json.dumps({**response(), "meta_info": meta}, separators=(",", ":")).encode(), "u", flat_logprobs=True
    )
    assert decoded["meta_info"]["customized_info"] == other


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 3))
def test_flat_logprobs_refuse_what_orjson_refuses(noise, place, cut):
    body = orjson.dumps(response())
    body = body[:place] + noise + body[place + cut :]
    outcomes = []
    for flat in (False, True):
        try:
            outcomes.append(read_generation(decode_generation(body, "u", flat_logprobs=flat), logprobs_expected=True))
        except SGLangDecodingError as error:
            outcomes.append(str(error))
    if isinstance(outcomes[0], str):
        assert outcomes[0] == outcomes[1]
    else:
        assert all(getattr(outcomes[0], name) == getattr(outcomes[1], name) for name in outcomes[0].__slots__)


def test_logprobs_that_were_not_requested_may_be_missing():
    assert read_generation(response(meta={"output_token_logprobs": None}), logprobs_expected=False).logprobs is None


@pytest.mark.parametrize(("ends", "stop"), [((2,), 2), ((), None)])
def test_stop_without_a_token_is_recognized_by_end_tokens(ends, stop):
    silent = response(meta={"finish_reason": {"type": "stop", "matched": None}})
    assert read_generation(silent, logprobs_expected=True, end_token_ids=ends).stop_token_id == stop


@pytest.mark.parametrize("matched", [7, 3, 2.0, True, [2], {}])
def test_stop_at_another_token_than_the_last_is_rejected(matched):
    """A response with a wrong stop token must not look complete."""
    finish = {"type": "stop", "matched": matched}
    with pytest.raises(SGLangDecodingError, match="stopped at .* the last sampled token is 2"):
        read_generation(response(meta={"finish_reason": finish}), logprobs_expected=True)


def routed(ids, *, prompt_tokens=3, output_ids=(7, 2), **meta):
    """A response with routed experts as the server writes them: little-endian int32, row by row."""
    text = base64.b64encode(struct.pack(f"<{len(ids)}i", *ids)).decode()
    meta = {"prompt_tokens": prompt_tokens, "routed_experts": text, "output_token_logprobs": None, **meta}
    meta.setdefault("finish_reason", {"type": "length", "length": len(output_ids)})
    return response(output_ids=list(output_ids), meta=meta)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 12), st.randoms())
def test_routed_experts_are_read_row_by_row(prompt_tokens, sampled, width, random):
    rows = [[random.randrange(1 << 31) for _ in range(width)] for _ in range(prompt_tokens + sampled - 1)]
    body = routed(sum(rows, []), prompt_tokens=prompt_tokens, output_ids=[7] * sampled)
    generation = read_generation(body, logprobs_expected=False)
    assert generation.expert_ids().tolist() == rows
    assert generation.expert_ids().shape == (generation.routed_rows, width if rows else 0)
    assert generation.routed_width == (width if rows else None)


def test_without_routed_experts_there_is_nothing_to_decode():
    generation = read_generation(response(), logprobs_expected=True)
    assert (generation.routed_experts, generation.routed_width, generation.expert_ids()) == (None, None, None)


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([1] * 18, {}, "18 ids .* among 4 tokens .3 prompt and 2 sampled"),
        ([], {}, "0 ids .* among 4 tokens"),
        ([1] * 6, {"prompt_tokens": 1, "output_ids": []}, "6 ids .* among 0 tokens"),
        ([1] * 30, {"finish_reason": {"type": "abort", "message": "Aborted"}}, "30 ids .* among 4 tokens"),
    ],
)
def test_number_of_expert_rows_must_match_the_tokens(ids, tokens, message):
    with pytest.raises(SGLangDecodingError, match=message):
        read_generation(routed(ids, **tokens), logprobs_expected=False)


@pytest.mark.parametrize("lost", [1, 2, 4])
def test_truncated_routed_experts_are_rejected(lost):
    body = routed([1] * 24)
    body["meta_info"]["routed_experts"] = body["meta_info"]["routed_experts"][:-lost]
    with pytest.raises(SGLangDecodingError, match="text was truncated"):
        read_generation(body, logprobs_expected=False)


@pytest.mark.parametrize("value", [[[1, 2]], 5, b"AAAA"])
def test_routed_experts_must_be_text(value):
    body = routed([1] * 24, routed_experts=value)
    with pytest.raises(SGLangDecodingError, match="complete"):
        read_generation(body, logprobs_expected=False)


def test_invalid_routed_experts_are_rejected_when_decoded():
    text = base64.b64encode(bytes(96)).decode()
    broken = read_generation(routed([1] * 24, routed_experts="*" + text[1:]), logprobs_expected=False)
    with pytest.raises(SGLangDecodingError, match="not base64"):
        broken.expert_ids()
    negative = read_generation(routed([1] * 23 + [-1]), logprobs_expected=False)
    with pytest.raises(SGLangDecodingError, match="negative id -1"):
        negative.expert_ids()


def spans(*triples):
    return [{"version": version, "start": start, "end": end} for version, start, end in triples]


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({}, (("default", 0, 2),)),  # SGLang before 0.5.23 names one version
        ({"weight_version": None}, ()),
        ({"weight_versions": spans(("a", 0, 1), ("b", 1, 2))}, (("a", 0, 1), ("b", 1, 2))),
        ({"weight_versions": spans(("a", 0, 0), ("b", 1, 2))}, (("b", 1, 2),)),
        ({"weight_versions": []}, ()),
    ],
)
def test_weight_versions_are_read_as_spans_of_tokens(meta, expected):
    assert read_generation(response(meta=meta), logprobs_expected=True).weight_versions == expected


@pytest.mark.parametrize("reported", [spans(("a", 0, 3)), spans(("a", 0, 2), ("b", 1, 2)), spans(("a", -1, 2))])
def test_weight_versions_of_other_tokens_are_rejected(reported):
    with pytest.raises(SGLangDecodingError, match="weight_versions"):
        read_generation(response(meta={"weight_versions": reported}), logprobs_expected=True)


WIDTH = 2
PROMPT = 3


def experts(version, start, end):
    """Rows of routed experts that show which weights routed which token."""
    rows = [[version, position] for position in range(start, end)]
    return base64.b64encode(b"".join(struct.pack(f"<{WIDTH}i", *row) for row in rows)).decode()


def part(ids, *, before=0, version=0, finish="abort", rid="r", **changes):
    """The response to a request that continued after `before` sampled tokens."""
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
    meta = {**QUEUED["meta_info"], "id": rid, "weight_versions": []}
    return read_generation({**QUEUED, "meta_info": meta}, logprobs_expected=True)


def test_joined_parts_keep_each_tokens_data():
    joined = join_parts(
        [part([11, 12], rid="a"), queued("b"), part([13, 2], before=2, version=1, finish="stop", rid="c")]
    )
    assert joined.output_ids.tolist() == [11, 12, 13, 2]
    assert joined.logprobs.tolist() == [-11, -12, -13, -2]
    assert (joined.finish_type, joined.stop_token_id, joined.latency_s) == ("stop", 2, 2.0)
    assert joined.weight_versions == (("0", 0, 2), ("1", 2, 4))
    assert (joined.prompt_tokens, joined.cached_tokens) == (PROMPT, 0)
    assert (joined.resumed_ids, joined.request_id) == (("a", "b"), "c")


def test_experts_before_an_abort_stay_those_of_the_old_weights():
    joined = join_parts([part([11, 12]), part([13, 2], before=2, version=1, finish="stop")])
    # The new weights computed the row of the last token before the abort: the old ones never saw it.
    assert joined.expert_ids().tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 4], [1, 5]]


@given(st.lists(st.integers(3, 90), min_size=1, max_size=12), st.lists(st.integers(0, 12), max_size=5))
def test_joined_parts_equal_the_whole_response(ids, cuts):
    bounds = [0, *sorted(min(cut, len(ids) - 1) for cut in cuts), len(ids)]
    parts = [
        part(ids[start:end], before=start, finish="stop" if last else "abort")
        for start, end, last in zip(bounds[:-1], bounds[1:], [*[False] * len(cuts), True], strict=True)
    ]
    whole, joined = part(ids, finish="stop"), join_parts(parts)
    for name in ("output_ids", "logprobs", "prompt_tokens", "cached_tokens", "weight_versions", "routed_experts"):
        assert getattr(joined, name) == getattr(whole, name), name


def test_single_part_is_returned_unchanged():
    whole = part([11, 2], finish="stop")
    assert join_parts([whole]) is whole
    with pytest.raises(ValueError, match="at least one part"):
        join_parts([])


def test_parts_aborted_in_the_queue_join_to_an_empty_response():
    joined = join_parts([queued("a"), queued("b")])
    assert (joined.output_ids.tolist(), joined.prompt_tokens, joined.finish_type) == ([], 0, "abort")
    assert joined.resumed_ids == ("a",)


def test_parts_with_inconsistent_experts_are_rejected():
    other = part([13, 2], before=2, finish="stop", routed_experts=base64.b64encode(bytes(4 * 3 * 6)).decode())
    with pytest.raises(SGLangDecodingError, match="routed experts"):
        join_parts([part([11, 12]), other])


def test_parts_with_missing_experts_are_rejected():
    with pytest.raises(SGLangDecodingError, match="did not return its tokens' routed experts"):
        join_parts([part([11, 12], routed_experts=None), part([13, 2], before=2, finish="stop")])


def test_next_part_requests_the_remaining_budget():
    params = {"max_new_tokens": 10, "min_new_tokens": 3, "temperature": 0.5}
    assert sampling_params_of_the_rest(params, 4) == {"max_new_tokens": 6, "min_new_tokens": 0, "temperature": 0.5}
    assert sampling_params_of_the_rest({"min_new_tokens": None}, 0) == {"min_new_tokens": None}


def test_without_a_budget_the_servers_spans_all_parts():
    assert sampling_params_of_the_rest({}, 100) == {"max_new_tokens": 28}
    assert sampling_params_of_the_rest({}, 300) == {}  # that server has another default


def top_p(*counts):
    """What slime's SGLang reports for tokens of which top-p kept so many ids."""
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return {"top_p_token_ids": list(range(offsets[-1])), "top_p_token_offsets": offsets}


def test_ids_kept_by_top_p_are_joined():
    first, second = part([11, 12], **top_p(2, 1)), part([13, 2], before=2, finish="stop", **top_p(1, 3))
    mask = join_parts([first, queued(), second]).kept_ids()
    assert list(mask.rows()) == [[0, 1], [2], [0], [1, 2, 3]]


def test_tokens_of_a_part_without_kept_ids_have_none():
    joined = join_parts([part([11, 12]), part([13, 2], before=2, finish="stop", **top_p(1, 3))])
    assert list(joined.kept_ids().rows()) == [[], [], [0], [1, 2, 3]]
    assert join_parts([part([11, 12]), part([13, 2], before=2, finish="stop")]).kept_ids() is None


def test_sampling_masks_and_logprobs_are_joined_by_token():
    """What an aborted part lacks is unknown for its tokens; the other tokens keep theirs."""

    def sampled_from(*rows):
        """What stock SGLang reports for tokens that were sampled from these ids."""
        return {
            "output_token_sampling_mask": list(rows),
            "output_token_sampling_logprobs": [-float(len(row)) for row in rows],
            "output_token_sampling_mask_length": len(rows),
        }

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
    ("reported", "message"),
    [
        ({"output_token_sampling_mask": [[11]]}, "2 token ids with 1 sampling masks"),
        ({"output_token_sampling_mask": [[11], [3]]}, "token 1 lacks the sampled id 12"),
        ({"output_token_sampling_mask": [[11], None]}, "complete"),
        ({"output_token_sampling_mask": [[11], [12, "x"]]}, "complete"),
        ({"output_token_sampling_logprobs": [0.0]}, "2 token ids with 1 sampling logprobs"),
        ({"output_token_sampling_logprobs": [[0.0], [0.0]]}, "not a number"),
        # Both counts are wrong: missing logprobs are the usual cause, and their error has the advice.
        ({"output_token_sampling_mask": [[11]], "output_token_logprobs": []}, "return_logprob"),
    ],
)
def test_sampling_masks_of_other_tokens_are_rejected(reported, message):
    with pytest.raises(SGLangDecodingError, match=message):
        part([11, 12], **reported)


# === wire ===


NOT_AN_ID = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(), st.lists(st.integers()), st.integers(max_value=-1), st.binary()
)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_every_list_of_ids_is_encoded_unchanged(ids):
    assert orjson.loads(encode_token_ids(ids)) == ids
    assert orjson.loads(encode_token_ids(tuple(ids), max(ids) + 1)) == ids
    assert orjson.loads(encode_token_ids(array("q", ids))) == ids


@given(st.lists(st.integers(0, 999)), NOT_AN_ID, st.lists(st.integers(0, 999)))
def test_invalid_id_is_rejected_with_its_index(before, bad, after):
    with pytest.raises(ValueError, match=rf"^input_ids\[{len(before)}\] is "):
        encode_token_ids([*before, bad, *after])


@given(st.lists(st.integers(0, 2000), min_size=1), st.integers(1, 2000))
def test_ids_outside_the_vocabulary_are_rejected(ids, vocab_size):
    outside = [index for index, token_id in enumerate(ids) if token_id >= vocab_size]
    if not outside:
        assert orjson.loads(encode_token_ids(ids, vocab_size)) == ids
        return
    with pytest.raises(ValueError, match=rf"input_ids\[{outside[0]}\] is {ids[outside[0]]} .*below {vocab_size}"):
        encode_token_ids(ids, vocab_size)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1))))
def test_ids_that_grow_are_encoded_like_the_whole_list(pieces):
    whole = [token_id for piece in pieces for token_id in piece]
    grown = EncodedIds()
    for piece in pieces:
        grown = grown.plus(array("i", piece))
    assert grown.count == len(whole)
    if not whole:
        with pytest.raises(ValueError, match="empty"):
            encode_generate(grown, {}, {})
    else:
        body = encode_generate(grown, {}, {})
        assert [body.with_rid(rid) for rid in "abb"] == [encode_generate(whole, {}, {}).with_rid(rid) for rid in "abb"]


@given(NOT_AN_ID)
def test_invalid_id_is_rejected_when_it_is_added(bad):
    with pytest.raises(ValueError, match=r"^input_ids\[1\] is "):
        EncodedIds.encode([1, 2]).plus([5, bad])


@given(st.text(), st.dictionaries(st.text(), st.integers(-(2**53), 2**53)))
def test_any_request_id_is_added_to_any_body(rid, sampling):
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
def test_invalid_body_is_a_decoding_error_with_the_url(body):
    with pytest.raises(SGLangDecodingError, match="http://h/generate (returned|responded)"):
        decode_generation(body, "http://h/generate")


ERROR_KEYS = st.sampled_from(["error", "message", "code", "detail", "x"])


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(ERROR_KEYS, inner),
        max_leaves=10,
    )
)
def test_an_error_body_of_any_shape_gives_a_message(body):
    assert isinstance(error_message(orjson.dumps(body).decode()), str)
