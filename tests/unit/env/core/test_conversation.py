"""The forms in which an action's messages may come."""

import base64
from typing import Any

import pytest

from strands_env.core import Action
from strands_env.core.environment import read_conversation

PIXEL = b"\x89PNG-not-really"
HELLO = {"role": "user", "content": [{"text": "Hello."}]}


def read(message: Any, history: Any = ()) -> Any:
    return read_conversation(Action(message=message, task_context={"conversation_history": list(history)}))


@pytest.mark.parametrize(
    "message",
    [
        "Hello.",
        HELLO,
        [HELLO],
        {"role": "user", "content": "Hello."},
        [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}],
        [{"role": "user", "content": ["Hello."]}],
    ],
    ids=str,
)
def test_text_message_and_chat_are_the_same_question(message: Any) -> None:
    found = read(message)
    assert (found.system, found.before, found.asked) == ([], [], HELLO)


def test_system_messages_come_first_and_apart() -> None:
    chat = [{"role": "system", "content": "A"}, {"role": "developer", "content": [{"type": "text", "text": "B"}]}]
    assert read([*chat, HELLO]).system == ["A", "B"]
    with pytest.raises(ValueError, match=r"message\[1\]: a system message must stand before"):
        read([HELLO, chat[0], HELLO])


def test_what_stands_before_the_question_is_told_from_the_history() -> None:
    answer = {"role": "assistant", "content": "Yes?"}
    found = read([HELLO, answer, HELLO], [HELLO, answer])
    assert [message["role"] for message in found.before] == ["user", "assistant"] * 2
    assert found.history_length == 2


def test_openais_tool_calls_and_answers_become_those_of_strands() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": {"x": 2}}},
    ]
    found = read(
        [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "assistant", "content": "Done."},
            HELLO,
        ]
    )
    _, called, answered, _ = found.before
    assert [block["toolUse"]["input"] for block in called["content"]] == [{"x": 1}, {"x": 2}]
    assert [block["toolResult"]["toolUseId"] for block in answered["content"]] == ["a", "b"]


def test_an_image_is_taken_from_its_data_url() -> None:
    url = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    found = read({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
    assert found.asked["content"] == [{"image": {"format": "png", "source": {"bytes": PIXEL}}}]


@pytest.mark.parametrize(
    "message",
    [
        [],
        [{"role": "assistant", "content": "Hello."}],
        [{"content": "Hello."}],
        [{"role": "critic", "content": "Hello."}],
        {"role": "user", "content": 7},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,??"}}]},
        [{"role": "tool", "content": "1"}, HELLO],
        [{"role": "system", "content": [{"image": {}}]}, HELLO],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}, HELLO],
        [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "add", "arguments": "[]"}}]}, HELLO],
        ["Hello."],
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(message: Any) -> None:
    with pytest.raises(ValueError):
        read(message)


def test_nothing_of_the_action_is_shared() -> None:
    action = Action(message=HELLO, task_context={"conversation_history": [HELLO]})
    found = read_conversation(action)
    found.asked["content"][0]["text"] = found.before[0]["content"][0]["text"] = "changed"
    assert action.message["content"][0]["text"] == "Hello."
    assert action.task_context.conversation_history[0]["content"][0]["text"] == "Hello."
