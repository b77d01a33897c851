"""The library's own copies of real tokenizers give the ids that the tokenizers themselves give."""

import copy

import pytest

from strands_sglang.encoder import get_encoder
from support.families import FAMILIES, load_tokenizer, require_families

pytestmark = pytest.mark.usefixtures("fetched")

TEXTS = (
    "",
    " leading and trailing \n\n",
    "Tokens: naïve 日本語 🙂 e\u0301 12345 \t\n  def f(x):\n\n\n    return x\r\n",
    '{"name": "look", "arguments": {"argument": "a  b"}}</tool_call>',
    "<table><tr><td>&nbsp;</td></tr></table>",
)


@pytest.fixture(scope="module")
def fetched():
    require_families()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_copy_encodes_and_decodes_as_its_tokenizer(family: str) -> None:  # A1
    tokenizer = load_tokenizer(family)
    encoder = get_encoder(tokenizer)
    added = tokenizer.added_tokens_decoder
    assert encoder.tokenizer.added_tokens_decoder == added
    marks = "".join(f"{token.content} a " for token in list(added.values())[:300])
    for text in (*TEXTS, marks, marks.join(TEXTS)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode(text) == ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert encoder.decode(ids) == decoded


def test_a_copy_of_a_truncating_tokenizer_encodes_in_full() -> None:  # A1
    tokenizer = copy.deepcopy(load_tokenizer("qwen3"))
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    assert len(get_encoder(tokenizer).encode("one two three four five six")) == 6
