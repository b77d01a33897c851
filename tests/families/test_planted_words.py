"""Words that published templates test for, planted in conversations: what is sent is what the template writes."""

import random
import re

from strands_sglang.families import find_family
from strands_sglang.templates.chat_template import (
    PROBE_TOOL,
    ChatTemplate,
    ChatTemplateError,
    SampledTurn,
    UnprovenContinuationError,
)
from support.agents import build_chatml_tokenizer
from support.families import families_directory

ANSWER = "The-unique-answer-is-42"
SWITCHES = ("/think", "/no_think", "/nothink", "detailed thinking off", "/system_override")
CONTROL = re.compile(
    r"<\|[^|<>\s{}]{1,40}\|?>|<｜[^｜<>\s{}]{1,40}｜>|</?s>|<[a-z_]+\|>|<[a-z_]+of_[a-z]+>|<SPECIAL_\d+>"
)
TESTED = (
    re.compile(r"""(['"])((?:\\.|(?!\1).){2,60}?)\1\s*(?:not\s+)?in\b"""),
    re.compile(r"""(?:with|split|find|==|!=)\s*\(?\s*(['"])(.{1,60}?)\1"""),
)


def stand_in(text):
    """A small tokenizer with the template and its control tokens."""
    tokenizer, family = build_chatml_tokenizer(), find_family(text)
    stops = list(family.stops) if family else []
    tokens = sorted({*CONTROL.findall(text), *stops})
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    eos = next((token for token in (*stops, "<end_of_utterance>", "<SPECIAL_12>", "</s>") if token in tokens), None)
    tokenizer.eos_token = eos or tokenizer.eos_token
    tokenizer.chat_template = text
    return tokenizer


def conversations(words, choose):
    """Yield `(messages, turn, new)` with each word in each place of a conversation."""
    places = ("system", "user", "answer", "name", "argument", "result", "turn", "last user")
    for word in words:
        for place in places:
            said = dict.fromkeys(places, "Well.") | {"name": "look", "argument": "a"}
            said[place] = choose.choice([word, f"Please. {word}", f"{word} now"]) if place != "name" else word
            calls = [
                {"type": "function", "id": f"call0000{i}", "function": {"name": name, "arguments": {"argument": text}}}
                for i, (name, text) in enumerate([(said["name"], said["argument"]), ("look", ANSWER)])
            ]
            system, user = {"role": "system", "content": said["system"]}, {"role": "user", "content": said["user"]}
            step = [
                {"role": "assistant", "content": "", "tool_calls": calls[:1]},
                {"role": "tool", "content": said["result"], "name": said["name"], "tool_call_id": "call00000"},
            ]
            answer = {"role": "assistant", "content": said["answer"]}
            later = {"role": "user", "content": said["last user"]}
            result = {"role": "tool", "content": "r", "name": "look", "tool_call_id": "call00001"}
            called = {"role": "assistant", "content": "", "tool_calls": calls[1:]}
            spoken = {"role": "assistant", "content": f"{said['turn']} {ANSWER}"}
            head = [system, user] if place == "system" else choose.choice(([system, user], [user]))
            yield choose.choice(
                (
                    ([*head, *step], called, [result]),
                    ([*head, answer, user, *step, answer, user], spoken, [later]),
                    ([*head, answer, later], spoken, [user]),
                )
            )


def test_no_word_in_a_conversation_makes_a_continuation_wrong():
    texts = {path.read_text(encoding="utf-8"): path for path in families_directory().glob("templates/*/*.jinja")}
    compared, wrong = 0, {}
    for text, path in texts.items():
        try:
            template = ChatTemplate(stand_in(text))
        except ChatTemplateError:
            continue
        words = {found for pattern in TESTED for _, found in pattern.findall(text)} | set(SWITCHES)
        for messages, turn, new in conversations(sorted(words), random.Random(path.name)):
            has_system = messages[0]["role"] == "system"
            if not template.stops or (turn.get("tool_calls") and "tool calls" in template.left_out):
                continue
            end = template.stop_ids[0]
            calls = [{"id": call["id"], "name": call["function"]["name"]} for call in turn.get("tool_calls", ())]
            try:
                prompt = template.continuation(
                    SampledTurn([5, 6, end], end, calls),
                    new,
                    [PROBE_TOOL],
                    has_system=has_system,
                    had_tool_results=any(message["role"] == "tool" for message in messages),
                    history=lambda messages=messages, turn=turn: [*messages, turn],
                )
            except UnprovenContinuationError:
                continue
            whole = template.try_render([*messages, turn, *new], [PROBE_TOOL], add_generation_prompt=True) or ""
            _, shown, after = whole.rpartition(ANSWER)
            ends = [after.index(stop) for stop in template.stops if stop in after]
            if not shown or not ends:
                continue
            compared += 1
            if after[min(ends) :] != prompt.text:
                wrong.setdefault(str(path), (prompt.text, after[min(ends) :], messages))
    assert wrong == {} and compared > 5_000
