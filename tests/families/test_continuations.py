"""Continuations on real chat templates and tokenizers, against the full render of the same conversation.

The reference is what the template writes behind the stop token of the sampled turn when it renders everything.
"""

import pytest

from strands_sglang.chat_template import ChatTemplate, ChatTemplateError, UnprovenContinuationError
from strands_sglang.messages import to_chat_messages, to_chat_tools
from support.families import FAMILIES, load_tokenizer, require_families

ANSWER = "The-unique-answer-is-42"
TOOLS = [
    {
        "name": "look_up",
        "description": "Looks something up.",
        "inputSchema": {"json": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}},
    }
]
# Nine characters, which is what Mistral's templates take for an id.
IDS = ("call00001", "call00002")

# (family, case) -> why the template itself has no continuation that could be proven. Nothing else may be unproven.
REFUSED: dict[tuple[str, str], str] = {
    **{
        (family, case): reason
        for family, reason in {
            "deepseek_v3_original": "drops tool calls",
            "deepseek_v3": "takes arguments as a JSON string only",
            "gemma_3": "refuses tool results",
            "smollm3": "drops tool calls",
        }.items()
        for case in ("one tool result", "two tool results")
    },
    **{(f"llama_3_{n}", "two tool results"): "refuses two calls in one turn" for n in (1, 2, 3)},
    **{(family, "user turn"): "moves the tools" for family in ("mistral_nemo", "mistral_small_3_2")},
}


def text(role, content):
    return {"role": role, "content": [{"text": content}]}


def calls(*ids):
    uses = [{"toolUse": {"toolUseId": use_id, "name": "look_up", "input": {"key": ANSWER}}} for use_id in ids]
    return {"role": "assistant", "content": uses}


def results(*ids):
    return {
        "role": "user",
        "content": [
            {"toolResult": {"toolUseId": use_id, "status": "success", "content": [{"text": f"value {i}"}]}}
            for i, use_id in enumerate(ids)
        ],
    }


CASES = {
    "one tool result": (calls(IDS[0]), [results(IDS[0])]),
    "two tool results": (calls(*IDS), [results(*IDS)]),
    "user turn": (text("assistant", ANSWER), [text("user", "And what is the next one?")]),
}


@pytest.fixture(scope="module", autouse=True)
def fetched():
    require_families()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_continuation_is_what_the_full_render_has_behind_the_stop(family, case):
    tokenizer = load_tokenizer(family)
    template = ChatTemplate(tokenizer)
    answer, new = CASES[case]
    opening = [text("user", "What is it? Look it up.")]
    tools = to_chat_tools(TOOLS)
    system = {"role": "system", "content": "Be brief."}
    uses = [block["toolUse"] for block in answer["content"] if "toolUse" in block]
    known = [{**use, "id": use["toolUseId"]} for use in uses]
    chat = to_chat_messages(new, known_calls=uses)

    def continuation(output_ids, stop):
        return template.continuation(output_ids, stop, known, chat, tools).token_ids

    try:
        whole = template.render(
            [system, *to_chat_messages([*opening, answer, *new])], tools, add_generation_prompt=True
        )
    except ChatTemplateError:
        whole = ""
    behind_answer = whole.rpartition(ANSWER)[2]
    stops = [(behind_answer.index(stop), stop) for stop in FAMILIES[family].end_of_turn if stop in behind_answer]
    if (family, case) in REFUSED or not stops or ANSWER not in whole:
        with pytest.raises(UnprovenContinuationError):
            continuation([7], None)
        assert (family, case) in REFUSED, f"the template has no full render to compare with: {whole[-300:]!r}"
        return

    position, stop = min(stops)
    stop_id = tokenizer.convert_tokens_to_ids(stop)
    expected = template.encode(behind_answer[position:])
    assert expected[0] == stop_id
    assert continuation([7, stop_id], stop_id) == expected[1:]
    # A turn that was cut off gets the stop as a prompt token.
    assert continuation([7], None) == expected
    # No other stop is silently taken for it.
    for other in set(FAMILIES[family].end_of_turn) - {stop}:
        other_id = tokenizer.convert_tokens_to_ids(other)
        with pytest.raises(UnprovenContinuationError, match="stopped with"):
            continuation([7, other_id], other_id)
