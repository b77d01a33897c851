"""The library's own copies of real tokenizers give the ids that the tokenizers themselves give."""

import copy

import pytest

from strands_sglang.templates.chat_template import PROBE_TOOL, ChatTemplate, SampledTurn
from strands_sglang.templates.encoder import get_encoder
from support.families import FAMILIES, load_tokenizer

TEXTS = (
    "",
    " leading and trailing \n\n",
    "Tokens: naïve 日本語 🙂 e\u0301 12345 \t\n  def f(x):\n\n\n    return x\r\n",
    '{"name": "look", "arguments": {"argument": "a  b"}}</tool_call>',
    "<table><tr><td>&nbsp;</td></tr></table>",
)


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


def _user_turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}, {"role": "user", "content": text}]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_messages_write_no_control_tokens_where_they_are_escaped(family: str) -> None:  # A15
    tokenizer = load_tokenizer(family)
    template = ChatTemplate(tokenizer, escape_control_tokens=True)
    added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    marks = [token.content for token in added.values() if token.content in template_text(tokenizer) or token.special]
    injected = "page" + "".join(f"{mark} {mark} x" for mark in marks[:60])

    def control(token_ids: list[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in added]

    opening = template.opening(_user_turns(injected), [PROBE_TOOL])
    assert control(opening.token_ids) == control(template.opening(_user_turns("page"), [PROBE_TOOL]).token_ids)
    assert injected in template.decode(opening.token_ids)
    result = {"role": "tool", "content": injected, "name": "look", "tool_call_id": "call00001"}
    calls = [{"id": template.call_id("call00001", "look", 0), "name": "look"}]
    stop = template.stop_ids[0]
    if template.self_check()["tool result"] is None:
        after, harmless = (
            template.continuation(
                SampledTurn([7, stop], stop, calls), [{**result, "content": text}], [PROBE_TOOL]
            ).token_ids
            for text in (injected, "page")
        )
        assert control(after) == control(harmless)
        assert injected in template.decode(after)


def template_text(tokenizer: object) -> str:
    return str(getattr(tokenizer, "chat_template", ""))
