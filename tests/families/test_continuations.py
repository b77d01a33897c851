"""What follows a sampled turn, for every family and case, compared with the full render of the conversation.

The reference is what the template writes after the end of the sampled turn when it renders everything. The ends of
turns come from the table of families, not from the library. docs/understand/families.md shows what is proven here;
`UPDATE_DOCS=1 pytest tests/families/test_continuations.py` writes it.
"""

import copy
import functools
import gc
import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from strands_sglang.messages import to_chat_messages, to_chat_tools
from strands_sglang.templates.chat_template import (
    CASES as TEMPLATE_CASES,
    PROBE_TOOL,
    ChatTemplate,
    ChatTemplateError,
    SampledTurn,
    UnprovenContinuationError,
    assistant_turn,
)
from strands_sglang.templates.encoder import get_encoder
from support.cpu_time import on_this_machine
from support.families import FAMILIES, load_tokenizer

CASES = (
    "tool result",
    "several tool results",
    "text after results",
    "user turn",
    "cut turn",
    "cut reasoning",
    "odd stop",
    "thinking on",
    "thinking off",
)
ANSWER = "The-unique-answer-is-42"
TOOL_NAMES = ("look_up", "search", "count_words")
TOOLS = [
    {
        "name": name,
        "description": "Looks something up.",
        "inputSchema": {"json": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}},
    }
    for name in TOOL_NAMES
]
USE_IDS = ("call00001", "call00002", "call00003")  # nine letters and digits, which the strictest templates want

# Families whose template has no place for the tool calls of a message, but writes its text.
DROPS_CALLS = ("deepseek_v3_original", "smollm3")

TOOL_CASES = ("tool result", "several tool results", "text after results", "full render")
# What the template itself makes impossible, by family and case. Nothing else may be unproven.
REFUSED = {
    **{("gemma_3", case): "the template refuses tool results" for case in TOOL_CASES},
    **{(family, "full render"): "the template drops tool calls" for family in DROPS_CALLS},
    **{(f"llama_3_{n}", "several tool results"): "the template refuses two calls in one turn" for n in (1, 2, 3)},
    **{
        (family, case): reason
        for family, reason in {
            "mistral_nemo": "the template moves system prompt and tools to the last user message",
            "mistral_small_3_2": "the template moves the tools to the last user message",
        }.items()
        for case in ("text after results", "user turn")
    },
    ("ministral_3", "text after results"): "the template refuses a user message after a tool result",
    **{
        (family, "full render"): "the template leaves out text next to a call, and refuses it in a message of its own"
        for family in ("mistral_nemo", "mistral_small_3_2")
    },
}

# Families whose template puts text next to a call after its result. A continuation leaves it where it was sampled.
MOVES_TEXT = {"gemma_4"}

# Families whose template leaves reasoning out of earlier turns, marks or not, by a rule of its own.
LEAVES_REASONING_OUT = {"deepseek_v3", "qwq"}


def text(role, content):
    return {"role": role, "content": [{"text": content}]}


def calls(*use_ids, key=ANSWER):
    uses = [
        {"toolUse": {"toolUseId": use_id, "name": name, "input": {"key": key}}}
        for use_id, name in zip(use_ids, TOOL_NAMES, strict=False)
    ]
    return {"role": "assistant", "content": uses}


def results(*use_ids):
    results = [
        {"toolResult": {"toolUseId": use_id, "status": "success", "content": [{"text": f"value {i}"}]}}
        for i, use_id in enumerate(use_ids)
    ]
    return {"role": "user", "content": results}


MARKS = ("<think>", "</think>", "<tool_response>", "</tool_response>", "<|im_end|>", "<|user|>", "[TOOL_CALLS]", "</s>")
PIECES = st.sampled_from((*MARKS, "x", "null", "{}", "{{ x }}", "12", "é", '"', "\\", "\n", " "))
RESULTS = st.lists(st.lists(PIECES, max_size=5).map("".join), min_size=1, max_size=4)


@settings(max_examples=15)
@pytest.mark.parametrize("family", FAMILIES)
@given(texts=RESULTS, count=st.integers(0, 2), has_system=st.booleans(), had_tool_results=st.booleans())
def test_a_shape_gives_what_a_render_gives(family, texts, count, has_system, had_tool_results):
    template = shared_template(family)
    chat = to_chat_messages([calls(*USE_IDS[:count]) if count else text("assistant", ANSWER)])
    made = [{"id": call["id"], "name": call["function"]["name"]} for call in chat[0].get("tool_calls", ())]
    turn = SampledTurn([5, template.stop_ids[0]], template.stop_ids[0], made)
    tools = to_chat_tools(TOOLS)
    for content in texts:
        new = [{"role": "tool", "content": content, "name": call["name"], "tool_call_id": call["id"]} for call in made]
        new = new or [{"role": "user", "content": content}]
        prompts = []
        for offered in (tools, list(tools)):  # only tools that are known to be plain take part in a shape
            try:
                prompts.append(
                    template.continuation(turn, new, offered, has_system=has_system, had_tool_results=had_tool_results)
                )
            except (UnprovenContinuationError, ChatTemplateError) as error:
                prompts.append(type(error))
        assert prompts[0] == prompts[1]


@functools.cache
def shared_template(family):
    return ChatTemplate(load_tokenizer(family))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_continuation_matches_the_full_render_after_the_turn(family, case):
    # The argument that switches reasoning, by the name that the family gave it.
    thinking = {
        "thinking on": {"enable_thinking": True, "thinking": True, "reasoning_effort": "medium"},
        "thinking off": {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
    }
    facts, tokenizer = FAMILIES[family], load_tokenizer(family)
    template = ChatTemplate(tokenizer, arguments=thinking.get(case, {}))
    tools_refused = (family, "tool result") in REFUSED

    def check(count=0, earlier_steps=0, plain=False, earlier_tools=False, with_calls=None, after_results=None):
        """One conversation: a sampled turn with `count` tool calls (a text if 0), and what follows it."""
        before = [text("user", "What is it? Look it up.")]
        for step in range(earlier_steps):
            if count or earlier_tools:
                before += [calls(f"step0000{step}", key="earlier"), results(f"step0000{step}")]
            else:
                before += [text("assistant", f"It is {step}."), text("user", "Really?")]
        if earlier_tools:
            before += [text("assistant", "So it is."), text("user", "Really?")]
        use_ids = USE_IDS[:count]
        answer = calls(*use_ids) if count else text("assistant", ANSWER)
        if count and family in DROPS_CALLS:
            answer["content"].insert(0, {"text": ANSWER})
        if with_calls:
            answer["content"].insert(0, {"text": with_calls})
        new = results(*use_ids) if count else text("user", "And what is the next one?")
        if after_results:
            new["content"].append({"text": after_results})
        system = [] if plain else [{"role": "system", "content": "Be brief."}]
        tools = None if plain else to_chat_tools(TOOLS)
        known = [
            {"toolUseId": use_id, "name": name, "id": use_id} for use_id, name in zip(use_ids, TOOL_NAMES, strict=False)
        ]

        def continuation(output_ids, stop, **options):
            return template.continuation(
                SampledTurn(output_ids, stop, known, **options),
                to_chat_messages([new], known_calls=known),
                tools,
                has_system=not plain,
                had_tool_results=earlier_steps > 0 and (count > 0 or earlier_tools),
                history=lambda: [*system, *to_chat_messages([*before, answer])],
            )

        try:
            whole = template.render(
                [*system, *to_chat_messages([*before, answer, new])], tools, add_generation_prompt=True
            )
        except ChatTemplateError as error:
            continuation([7], None)  # must raise: there is nothing to compare it with
            pytest.fail(f"a continuation where the template refuses: {error}")
        behind = whole.rpartition(ANSWER)[2] if ANSWER in whole else ""
        stops = [(behind.index(stop), stop) for stop in facts.end_of_turn if stop in behind]
        if not stops:
            continuation([7], None)
            pytest.fail(f"a continuation where the template has none: {whole[-300:]!r}")
        position, stop = min(stops)
        end_id = tokenizer.convert_tokens_to_ids(stop)
        expected = template.encode(behind[position:])
        assert expected[0] == end_id, f"{stop!r} is not one token"
        if case == "cut turn":
            assert continuation([7], None).token_ids == template.encode(behind[:position]) + expected
            assert continuation([7, end_id], None).token_ids == expected[1:]
        elif case == "cut reasoning":
            start, close = facts.reasoning or ("", "")
            cut = template.encode(start + "Let me see")
            got = continuation(cut, None, ends_in_reasoning=facts.reasoning is not None).token_ids
            assert got[-len(expected) :] == expected
            assert template.decode(got).lstrip().startswith(close.strip())
        elif case == "odd stop":
            others = {tokenizer.convert_tokens_to_ids(other) for other in facts.end_of_turn if other != stop}
            control = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i != end_id)
            for other in others or {next(control)}:
                prompt = continuation([7, other], other)
                assert (prompt.token_ids, prompt.kept) == (expected, 1)
        else:
            assert continuation([7, end_id], end_id).token_ids == expected[1:]

    if case in ("tool result", "several tool results"):
        counts = (1,) if case == "tool result" else (2, 3)
        checks = [{"count": count, "earlier_steps": steps} for count in counts for steps in (0, 1, 2)]
        if family not in MOVES_TEXT and (family, "full render") not in REFUSED:
            checks.append({"count": counts[-1], "with_calls": "Let me look."})
    elif case == "text after results":
        checks = [{"count": 1, "earlier_steps": steps, "after_results": "Be quick."} for steps in (0, 1)]
    elif case == "user turn":
        checks = [{"earlier_steps": steps} for steps in (0, 1, 2)]
        checks += [] if tools_refused else [{"earlier_steps": 2, "earlier_tools": True}]
    else:
        # If a user turn needs a conversation without tools, or a tool result is impossible, the other one is checked.
        checks = [{"plain": (family, "user turn") in REFUSED}]
        checks += [] if tools_refused or case not in thinking else [{"count": 1}]
    refusal = None
    try:
        for options in checks:
            check(**options)
    except UnprovenContinuationError as error:
        refusal = error
    assert (refusal is not None) is ((family, case) in REFUSED), refusal


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_render_holds_every_part_or_is_rejected(family):
    template = ChatTemplate(load_tokenizer(family))
    parts = {name: f"the-{name}-of-the-turn" for name in ("reasoning", "text", "key")}
    turn = calls(USE_IDS[0], key=parts["key"])
    reasoning = {"reasoningContent": {"reasoningText": {"text": parts["reasoning"]}}}
    turn["content"] = [reasoning, {"text": parts["text"]}, *turn["content"]]
    messages = [
        text("user", "What is it?"),
        calls(USE_IDS[1], key="earlier"),
        results(USE_IDS[1]),
        text("assistant", "the-earlier-answer"),
        text("user", "And now?"),
        turn,
        results(USE_IDS[0]),
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        *to_chat_messages(
            messages, as_shown=lambda use_id, name, number: (name, template.call_id(use_id, name, number))
        ),
    ]
    if (family, "full render") in REFUSED:
        with pytest.raises(ChatTemplateError):
            template.opening(chat, to_chat_tools(TOOLS))
        return
    rendered = template.opening(chat, to_chat_tools(TOOLS)).text
    wanted = ["Be brief.", "What is it?", "earlier", "the-earlier-answer", "And now?", *parts.values(), "value 0"]
    if family in LEAVES_REASONING_OUT:
        wanted.remove(parts["reasoning"])
    assert [part for part in wanted if part not in rendered] == []
    order = [rendered.index(part) for part in parts.values() if part in rendered] + [rendered.rindex("value 0")]
    assert (order == sorted(order)) is (family not in MOVES_TEXT), rendered


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_agrees_with_these_tests(family):
    check = ChatTemplate(load_tokenizer(family)).self_check()
    refused = {case for (name, case) in REFUSED if name == family and case in TEMPLATE_CASES}
    if "user turn" in refused:
        refused.add("cut turn")  # a user message is what follows a cut turn
    assert {case for case, reason in check.items() if reason} == refused


def test_the_self_check_costs_at_most_50_ms_in_every_family():
    tokenizers = {family: load_tokenizer(family) for family in FAMILIES}
    costs = {}
    gc.collect()
    gc.disable()  # a collection would traverse all those vocabularies
    try:
        for family, tokenizer in tokenizers.items():
            ChatTemplate(tokenizer)  # compiles the template
            costs[family] = math.inf
            for _ in range(20):  # a busy core takes twice as long
                start = time.thread_time()
                ChatTemplate(tokenizer)
                costs[family] = min(costs[family], time.thread_time() - start)
                if costs[family] <= 0.050:
                    break
    finally:
        gc.enable()
    limit = on_this_machine(0.050)
    assert {family: cost for family, cost in costs.items() if cost > limit} == {}


def name_of(family):
    return f"{family} †" if FAMILIES[family].stand_in else family


def parser_of(family):
    return f"`{FAMILIES[family].tool_format}`" if FAMILIES[family].tool_format else "none"


def test_the_documented_matrix_is_proven_here():
    cases = (*CASES, "full render")
    real = sum(not facts.stand_in for facts in FAMILIES.values())
    complete = len(FAMILIES) - len({family for family, _ in REFUSED})
    moves_text, leaves_reasoning_out = (
        " and ".join(f"`{family}`" for family in sorted(families)) for families in (MOVES_TEXT, LEAVES_REASONING_OUT)
    )
    proven: dict[str, list[str]] = {}
    for family in FAMILIES:
        if all((family, case) not in REFUSED for case in cases):
            proven.setdefault(parser_of(family), []).append(name_of(family))
    reasons: dict[tuple[str, str], list[str]] = {}
    for (family, case), reason in REFUSED.items():
        reasons.setdefault((family, reason.removeprefix("the template ")), []).append(case)
    rows: dict[str, list[str]] = {}
    for (family, reason), refused in reasons.items():
        rows.setdefault(f"{parser_of(family)} | {reason} | {', '.join(refused)} |", []).append(name_of(family))
    lines = [
        "# Model families",
        "",
        "Before you train a model, you want to know whether its prompts can be continued token by token. For each of",
        f"these {len(FAMILIES)} families we compare what follows a sampled turn with a full render by the family's own",
        f"chat template. {complete} families prove [every case](#the-cases):",
        "",
        "| Tool parser | Families with every case proven |",
        "|---|---|",
        *(f"| {parser} | {', '.join(names)} |" for parser, names in proven.items()),
        "",
        f"† No package registry has this family's tokenizer, so its control tokens were added to a related one; {real}",
        "families have their real one. All templates are the real ones, listed in `tests/support/families`.",
        "",
        "## Families with a refused case",
        "",
        "A refused case is never guessed: your call opens a new sequence from a full render, and",
        "[`turn.reason`](../guides/two-sequences.md) says why. If the template refuses the full render too, you get an",
        "error with the template's own message. Is your model not here? Run",
        "[`strands-sglang check MODEL`](templates.md#does-my-model-work).",
        "",
        "| Families | Tool parser | The template | Refused cases |",
        "|---|---|---|---|",
        *(f"| {', '.join(names)} | {rest}" for rest, names in rows.items()),
        "",
        "## The cases",
        "",
        "Tool results and user turns are compared in conversations of three lengths.",
        "",
        "| Case | What is compared |",
        "|---|---|",
        "| tool result | one result after a tool call |",
        "| several tool results | two and three results of different tools, also after text next to the calls |",
        "| text after results | a user's text in the message with the results, after them |",
        "| user turn | a user message after an answer |",
        "| cut turn | a turn ended by `max_new_tokens` or a stop string: its missing end becomes prompt tokens |",
        "| cut reasoning | reasoning that was cut off: it is closed as the family closes it |",
        "| odd stop | a turn ended by a control token that the template does not write there: it is left out |",
        "| thinking on, thinking off | a user turn and a tool result under the template's own switch |",
        "| full render | every part of every turn (reasoning, text next to a call, call, result) in some form |",
        "",
        "## What a full render changes",
        "",
        "- Some templates leave out text next to a call: Llama 3, Hermes 3, Granite 3, Phi 4 mini, TRL's DeepSeek-V3.",
        "  The text then becomes a message of its own before the calls.",
        "- Reasoning that a template does not know is written into the text between the family's marks.",
        f"- The template of {moves_text} puts text next to a call after the call's result. A continuation leaves it",
        "  where it was sampled.",
        f"- The templates of {leaves_reasoning_out} leave out reasoning of earlier turns.",
        "- Some templates drop a part in some conversations only: `gemma_4` a tool result that does not follow its",
        "  call, `gpt_oss` text next to a call once an answer follows, `mistral_nemo` the system prompt if the last",
        "  message is a tool result. If a part is missing, you get an error that names the message.",
        "",
    ]
    document = Path(__file__).parents[2] / "docs" / "understand" / "families.md"
    if "UPDATE_DOCS" in os.environ:
        document.write_text("\n".join(lines), encoding="utf-8")
    assert document.read_text(encoding="utf-8") == "\n".join(lines)


@pytest.mark.parametrize(
    ("family", "messages", "lost"),
    [
        (
            "gemma_4",
            [text("user", "q"), calls(USE_IDS[0]), text("assistant", "One moment."), results(USE_IDS[0])],
            "message 3: the chat template drops the tool results",
        ),
        (
            "gpt_oss",
            [text("user", "q"), calls(USE_IDS[0]), results(USE_IDS[0]), text("assistant", "a"), text("user", "next")],
            r"messages\[1\]: the chat template drops the text next to a tool call",
        ),
        (
            "mistral_nemo",
            [text("user", "q"), calls(USE_IDS[0]), results(USE_IDS[0])],
            "message 0: the chat template drops the system prompt",
        ),
    ],
)
def test_an_opening_that_would_lack_a_part_is_an_error(family, messages, lost):
    chat = to_chat_messages(copy.deepcopy(messages))
    if family == "gpt_oss":
        chat[1]["content"] = "I look it up."
    if family == "mistral_nemo":
        chat.insert(0, {"role": "system", "content": "Be brief."})
    with pytest.raises(ChatTemplateError, match=lost):
        ChatTemplate(load_tokenizer(family)).opening(chat, to_chat_tools(TOOLS))


def test_results_have_the_ids_that_kimis_template_writes():
    template = ChatTemplate(load_tokenizer("kimi_k2"))  # numbers the calls of each turn from 0
    messages = []
    for step in range(2):
        call = {"toolUse": {"toolUseId": f"use{step}", "name": "look_up", "input": {"key": str(step)}}}
        result = {"toolUseId": f"use{step}", "status": "success", "content": [{"text": f"value {step}"}]}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [{"toolResult": result}]}]
    chat = to_chat_messages(
        [{"role": "user", "content": [{"text": "Look."}]}, *messages],
        as_shown=lambda use_id, name, number: (name, template.call_id(use_id, name, number)),
    )
    text = template.opening(chat, None).text
    assert text.count("<|tool_call_begin|>functions.look_up:0<|") == text.count("## Return of functions.look_up:0") == 2


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_copy_encodes_and_decodes_as_its_tokenizer(family):
    """The library's copies of real tokenizers give the same ids as the tokenizers."""
    texts = (
        "",
        " leading and trailing \n\n",
        "Tokens: naïve 日本語 🙂 e\u0301 12345 \t\n  def f(x):\n\n\n    return x\r\n",
        '{"name": "look", "arguments": {"argument": "a  b"}}</tool_call>',
        "<table><tr><td>&nbsp;</td></tr></table>",
    )
    tokenizer = load_tokenizer(family)
    encoder = get_encoder(tokenizer)
    added = tokenizer.added_tokens_decoder
    assert encoder.tokenizer.added_tokens_decoder == added
    marks = "".join(f"{token.content} a " for token in list(added.values())[:300])
    for text in (*texts, marks, marks.join(texts)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode(text) == ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert encoder.decode(ids) == decoded


def test_a_copy_of_a_truncating_tokenizer_encodes_in_full():
    tokenizer = copy.deepcopy(load_tokenizer("qwen3"))
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    assert len(get_encoder(tokenizer).encode("one two three four five six")) == 6


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_messages_write_no_control_tokens_where_they_are_escaped(family):
    def user_turns(text):
        user = {"role": "user", "content": text}
        return [user, {"role": "assistant", "content": "x"}, user]

    def template_text(tokenizer):
        return str(getattr(tokenizer, "chat_template", ""))

    tokenizer = load_tokenizer(family)
    template = ChatTemplate(tokenizer, escape_control_tokens=True)
    added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    marks = [token.content for token in added.values() if token.content in template_text(tokenizer) or token.special]
    injected = "page" + "".join(f"{mark} {mark} x" for mark in marks[:60])

    def control(token_ids):
        return [token_id for token_id in token_ids if token_id in added]

    opening = template.opening(user_turns(injected), [PROBE_TOOL])
    assert control(opening.token_ids) == control(template.opening(user_turns("page"), [PROBE_TOOL]).token_ids)
    assert injected in template.decode(opening.token_ids)
    result = {"role": "tool", "content": injected, "name": "look", "tool_call_id": "call00001"}
    calls = [{"id": template.call_id("call00001", "look", 0), "name": "look"}]
    stop = template.stop_ids[0]
    if template.self_check()["tool result"] is None:
        after, harmless = (
            template.continuation(
                SampledTurn([7, stop], stop, calls),
                [{**result, "content": text}],
                [PROBE_TOOL],
                history=lambda: [{"role": "system", "content": "s"}, user_turns("u")[0], assistant_turn(calls, "x")],
            ).token_ids
            for text in (injected, "page")
        )
        assert control(after) == control(harmless)
        assert injected in template.decode(after)
