import pytest
from hypothesis import given, strategies as st

from strands_sglang.drift import measure_drift
from strands_sglang.trajectory.tokens import TokenManager


def sequence(*segments):
    tm = TokenManager()
    for i, ids in enumerate(segments):
        if i % 2:
            tm.add_response(ids, [0.0] * len(ids))
        else:
            tm.add_prompt(ids)
    return tm


def test_a_canonical_sequence_does_not_drift(chatml_tokenizer):
    ids = chatml_tokenizer.encode("What is 17 times 23?")
    drift = measure_drift([sequence(ids)], chatml_tokenizer)
    assert (drift.tokens, drift.share_affected, sum(drift.drifted.values())) == (len(ids), 0.0, 0)


@pytest.fixture
def digits(chatml_tokenizer):
    """ "17" as two tokens, as encoding never produces it."""
    ids = [chatml_tokenizer.encode(digit)[0] for digit in "17"]
    assert len(chatml_tokenizer.encode("17")) == 1
    return ids


def test_noncanonical_sampled_tokens_are_counted(chatml_tokenizer, digits):
    end = chatml_tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = chatml_tokenizer.encode("Say it.<|im_end|>")
    drift = measure_drift([sequence(prompt, [*digits, end])], chatml_tokenizer)
    (only,) = drift.sequences
    assert only.drifted == {"sampled": 2, "boundary": 0, "template": 0}
    assert only.first == len(prompt)
    assert drift.share_affected == 1.0


def test_tokens_that_merge_across_an_edge_count_as_boundary(chatml_tokenizer, digits):
    (only,) = measure_drift([sequence(digits[:1], digits[1:])], chatml_tokenizer).sequences
    assert only.drifted == {"sampled": 0, "boundary": 2, "template": 0}


def test_noncanonical_prompt_tokens_count_as_template(chatml_tokenizer, digits):
    (only,) = measure_drift([sequence(digits)], chatml_tokenizer).sequences
    assert only.drifted == {"sampled": 0, "boundary": 0, "template": 2}


def test_tokens_after_a_drifted_stretch_are_not_counted(chatml_tokenizer, digits):
    tail = chatml_tokenizer.encode(" times 23 is the question, and the calculator tool knows.")
    (only,) = measure_drift([sequence([*digits, *tail])], chatml_tokenizer).sequences
    assert (sum(only.drifted.values()), only.first) == (2, 0)


def test_the_drift_of_several_episodes_adds_up(chatml_tokenizer, digits):
    clean = measure_drift([sequence(chatml_tokenizer.encode("fine"))], chatml_tokenizer)
    total = clean + measure_drift([sequence(digits)], chatml_tokenizer)
    assert (total.share_affected, sum(total.drifted.values())) == (0.5, 2)


def test_truncated_character_counts_as_drift(chatml_tokenizer):
    whole = chatml_tokenizer.encode("\N{REPLACEMENT CHARACTER}")  # what part of a character decodes to
    assert len(whole) > 1
    (only,) = measure_drift([sequence(whole[:1])], chatml_tokenizer).sequences
    assert (only.drifted["template"], only.first) == (1, 0)


@given(st.data())
def test_drift_is_reported_iff_encoding_gives_other_ids(chatml_tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(chatml_tokenizer) - 1), min_size=1, max_size=30))
    text = chatml_tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    same = chatml_tokenizer.encode(text, add_special_tokens=False) == ids
    (only,) = measure_drift([sequence(ids)], chatml_tokenizer).sequences
    assert only.is_affected is not same
    assert sum(only.drifted.values()) <= len(ids)
