import copy
import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from strands_sglang.messages import (
    UnsupportedContentError,
    canonical_content,
    fingerprint,
    message_digest,
    pictures_of,
    system_text,
    to_chat_messages,
    to_chat_tools,
)
from strands_sglang.messages.said import said_in
from support.agents import assistant, user


def tool_use(use_id, name="calculator", **tool_input):
    return {"toolUse": {"toolUseId": use_id, "name": name, "input": tool_input}}


def tool_result(use_id, *content, status="success"):
    return {"toolResult": {"toolUseId": use_id, "status": status, "content": list(content)}}


def image(data, image_format="png"):
    return {"image": {"format": image_format, "source": {"bytes": data}}}


def document(source, **fields):
    return {"document": {"name": "d", "source": source, **fields}}


# --- chat messages ---


def test_all_text_blocks_are_rendered():
    assert to_chat_messages([user("one", "two")]) == [{"role": "user", "content": "one\ntwo"}]


def test_tool_calls_keep_text_reasoning_and_arguments():
    reasoning = {"reasoningContent": {"reasoningText": {"text": "hm"}}}
    (chat,) = to_chat_messages([assistant(reasoning, "let me see", tool_use("a", x=1))])
    assert chat["content"] == "let me see"
    assert chat["reasoning_content"] == "hm"
    assert chat["tool_calls"] == [
        {"type": "function", "id": "a", "function": {"name": "calculator", "arguments": {"x": 1}}}
    ]


def test_tool_results_come_in_the_order_of_their_calls():
    history = [
        assistant(*(tool_use(f"call_{i}", name=f"t{i}") for i in range(12))),
        user(*(tool_result(f"call_{i}", {"text": str(i)}) for i in (11, 2, 0, 1, *range(3, 11)))),
    ]
    results = to_chat_messages(history)[1:]
    assert [result["content"] for result in results] == [str(i) for i in range(12)]
    assert [result["name"] for result in results] == [f"t{i}" for i in range(12)]


def test_results_are_in_the_order_of_calls_in_earlier_messages():
    chat = to_chat_messages(
        [user(tool_result("b", {"text": "2"}), tool_result("a", {"text": "1"}))],
        known_calls=[{"toolUseId": "a", "name": "x", "id": "a"}, {"toolUseId": "b", "name": "y", "id": "b"}],
    )
    assert [message["content"] for message in chat] == ["1", "2"]


def test_text_next_to_tool_results_becomes_a_user_message():
    chat = to_chat_messages([user("and also", tool_result("a", {"text": "4"}))])
    assert [(message["role"], message["content"]) for message in chat] == [("tool", "4"), ("user", "and also")]


def test_json_text_and_empty_results_are_rendered():
    chat = to_chat_messages(
        [user(tool_result("a", {"json": {"ü": [1]}}, {"text": "t"}), tool_result("b", status="error"))]
    )
    assert [message["content"] for message in chat] == ['{"ü": [1]}\nt', ""]


def test_an_error_is_rendered_as_its_text():
    history = [user(tool_result("a", {"text": "Error: no such file"}, status="error"))]
    assert to_chat_messages(history) == [{"role": "tool", "content": "Error: no such file", "tool_call_id": "a"}]


def test_an_empty_message_is_an_empty_user_message():
    assert to_chat_messages([user()]) == [{"role": "user", "content": ""}]


def test_a_notice_replaces_the_result_of_an_unparsed_call():
    notices = {"a": "your call was not valid JSON"}
    (chat,) = to_chat_messages([user(tool_result("a", {"text": "Unknown tool"}))], result_notice=notices.get)
    assert chat["content"] == "your call was not valid JSON"
    served = user(tool_result("a", {"text": "served"}), tool_result("b", {"text": "Unknown tool: b"}))
    assert [chat["content"] for chat in to_chat_messages([served], result_notice=notices.get)] == [
        "served",
        "Unknown tool: b",
    ]


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (
            user({"image": {"format": "png", "source": {"bytes": b"x"}}}),
            r"messages\[0\].content\[0\]: .*processor=",
        ),
        (user(tool_result("a", {"image": {}})), r"\.content\[0\].toolResult.content\[0\]: .*processor="),
        (user("x", {"video": {}}), r"messages\[0\].content\[1\]: .*video"),
        (user(tool_result("a", {"video": {}})), r"messages\[0\].content\[0\].toolResult.content\[0\]: .*video"),
        (user({}), r"messages\[0\].content\[0\]: .*empty"),
        (assistant({"reasoningContent": {"redactedContent": b"x"}}), r"messages\[0\].content\[0\]"),
        (assistant({"image": {}}), r"messages\[0\].content\[0\]: .*image"),
    ],
)
def test_content_that_cannot_be_rendered_raises_with_its_path(message, path):
    with pytest.raises(UnsupportedContentError, match=path):
        to_chat_messages([message])


def test_the_path_counts_from_the_start_of_the_history():
    with pytest.raises(UnsupportedContentError, match=r"messages\[4\].content\[0\]"):
        to_chat_messages([user({"image": {}})], first=4)


def test_halves_of_surrogate_pairs_are_replaced():
    broken = b"caf\xe9".decode("utf-8", "surrogateescape")
    (result,) = to_chat_messages([user(tool_result("a", {"text": broken}, {"json": [broken]}))])
    assert result["content"] == 'caf?\n["caf?"]'
    use = {"toolUseId": "a", "name": "look", "input": {"where": [broken, 1.5]}}
    (turn,) = to_chat_messages([{"role": "assistant", "content": [{"toolUse": use}]}])
    assert turn["tool_calls"][0]["function"]["arguments"] == {"where": ["caf?", 1.5]}


def test_system_prompts_and_tools_hold_no_halves_of_surrogate_pairs():
    broken = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert system_text(broken, None) == system_text(None, [{"text": broken}]) == "caf?"
    schema = {"json": {"type": "object", "properties": {"a": {"description": broken}}}}
    (tool,) = to_chat_tools([{"name": "look", "description": broken, "inputSchema": schema}])
    assert tool["function"]["description"] == tool["function"]["parameters"]["properties"]["a"]["description"] == "caf?"


@pytest.mark.parametrize("message", [user, assistant])
@pytest.mark.parametrize("form", [to_chat_messages, said_in])
def test_cache_points_are_invisible(form, message):
    assert form([message("x", {"cachePoint": {"type": "default"}})]) == form([message("x")])


def test_tools_take_the_openai_form():
    spec = {"name": "add", "description": "Adds.", "inputSchema": {"json": {"type": "object"}}}
    assert to_chat_tools([spec]) == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        }
    ]
    assert to_chat_tools([]) is None
    assert to_chat_tools(None) is None


def test_system_prompt_texts_are_joined_and_others_rejected():
    assert system_text("s", None) == "s"
    assert system_text(None, None) is None
    assert system_text(None, [{"text": "a"}, {"cachePoint": {}}, {"text": "b"}]) == "a\nb"
    with pytest.raises(UnsupportedContentError, match=r"system_prompt\[0\]"):
        system_text(None, [{"image": {}}])
    with pytest.raises(UnsupportedContentError, match=r"system_prompt\[1\].*guardContent"):
        system_text("s", [{"text": "s"}, {"guardContent": {}}])  # as Strands passes a list


# --- images ---


def test_a_message_with_images_is_a_list_of_parts_in_order():
    message = user("one", "two", image(b"x"), image(b"y", "jpeg"), "three")
    (chat,) = to_chat_messages([message], images=True)
    assert chat["content"] == [
        {"type": "text", "text": "one\ntwo"},
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "three"},
    ]
    assert [(one.data, one.format) for one in pictures_of([chat])] == [(b"x", "png"), (b"y", "jpeg")]


def test_all_other_messages_stay_text():
    chat = to_chat_messages([user("a", "b"), user(image(b"x"))], images=True)
    assert [message["content"] for message in chat] == ["a\nb", [{"type": "image"}]]


def test_images_of_results_are_in_call_order_with_paths():
    history = [
        assistant(tool_use("a"), tool_use("b")),
        user(image(b"3"), tool_result("b", image(b"2")), tool_result("a", {"json": 1}, image(b"1"))),
    ]
    chat = to_chat_messages(history, images=True, first=2)
    assert chat[1]["content"] == [{"type": "text", "text": "1"}, {"type": "image"}]
    assert [(one.data, one.where) for one in pictures_of(chat)] == [
        (b"1", "messages[3].content[2].toolResult.content[1]"),
        (b"2", "messages[3].content[1].toolResult.content[0]"),
        (b"3", "messages[3].content[0]"),
    ]


def test_the_bytes_are_not_copied():
    data = b"x" * 100
    assert pictures_of(to_chat_messages([user(image(data))], images=True))[0].data is data


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ({"location": {"type": "s3", "uri": "s3://b/k"}}, "not location"),
        ({"bytes": b""}, "not an empty bytes"),
        ({"bytes": "aGk="}, r"not bytes \(str\)"),
        ({}, "not nothing"),
    ],
)
def test_an_image_that_is_not_bytes_raises_with_its_path(source, complaint):
    with pytest.raises(UnsupportedContentError, match=rf"messages\[0\].content\[0\]: .*{complaint}"):
        to_chat_messages([user({"image": {"format": "png", "source": source}})], images=True)


# --- documents ---


@pytest.mark.parametrize("file_format", ["txt", "md", "csv", "html"])
def test_a_text_document_is_rendered_with_its_name_and_format(file_format):
    block = document({"bytes": b"\xef\xbb\xbfd\xc3\xa9j\xc3\xa0"}, format=file_format)
    assert to_chat_messages([user("see", block)]) == [
        {"role": "user", "content": f'see\n<document name="d" format="{file_format}">\ndéjà\n</document>'}
    ]


@pytest.mark.parametrize(
    ("source", "fields", "rendered"),
    [
        ({"text": "a\nb"}, {"format": "txt"}, '<document name="d" format="txt">\na\nb\n</document>'),
        (
            {"content": [{"text": "a"}, {"text": "b"}]},
            {"format": "txt"},
            '<document name="d" format="txt">\na\nb\n</document>',
        ),
        ({"bytes": b"a\nb"}, {"format": "txt"}, '<document name="d" format="txt">\na\nb\n</document>'),
        ({"text": "x"}, {"format": "pdf"}, '<document name="d" format="pdf">\nx\n</document>'),
        (
            {"text": "x"},
            {"name": 'a" <b>', "context": "from 2024"},
            '<document name="a&quot; &lt;b&gt;" context="from 2024">\nx\n</document>',
        ),
    ],
    ids=["text", "list of texts", "bytes", "text of a binary format", "a name that would break out"],
)
def test_the_text_of_a_document_is_rendered(source, fields, rendered):
    (chat,) = to_chat_messages([user(document(source, **fields))])
    assert chat["content"] == rendered


def test_a_document_in_a_result_is_rendered():
    (chat,) = to_chat_messages([user(tool_result("a", {"text": "found"}, document({"text": "x"})))])
    assert chat["content"] == 'found\n<document name="d">\nx\n</document>'


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        (
            {"source": {"bytes": b"%PDF"}, "format": "pdf"},
            r"content\[0\]: .*pdf document.*extract its text",
        ),
        ({"source": {"bytes": b"PK"}, "format": "docx"}, r"content\[0\]: .*docx document block"),
        ({"source": {"bytes": b"x"}}, r"content\[0\]: .*only bytes of txt"),
        ({"source": {"bytes": b"\xff"}, "format": "txt"}, r"content\[0\]: .*not UTF-8"),
        ({"source": {"location": {"type": "s3"}}, "format": "txt"}, r"content\[0\]: .*not location"),
        ({}, r"content\[0\]: .*not nothing"),
        ({"source": {"content": [{"image": {}}]}}, r"content\[0\].document.source.content\[0\]: .*image"),
    ],
)
def test_documents_that_are_not_text_raise_with_their_path(block, complaint):
    with pytest.raises(UnsupportedContentError, match=rf"messages\[0\].{complaint}"):
        to_chat_messages([user({"document": {"name": "d", **block}})])


# --- fingerprints ---


def test_an_answer_is_recognized_as_strands_returns_it():
    for emitted, returned in [
        (assistant(), assistant("[blank text]")),
        (assistant("  \n"), assistant("[blank text]")),
        (assistant(" ", tool_use("a", x=1)), assistant(tool_use("a", x=1))),
        (assistant(tool_use("a", x=1, y="é")), assistant(tool_use("a", **json.loads('{"y": "\\u00e9", "x": 1}')))),
    ]:
        assert message_digest(emitted) == message_digest(returned)


def test_only_role_and_content_count():
    assert message_digest({**user("x"), "metadata": {"usage": 1}, "tracking_id": "t"}) == message_digest(user("x"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("x"), assistant("x")),
        (user("x"), user("x ")),
        (user("a", "b"), user("ab")),
        (assistant(tool_use("a", x=1)), assistant(tool_use("b", x=1))),
        (assistant(tool_use("a", x=1)), assistant(tool_use("a", x="1"))),
        (user({"image": {"source": {"bytes": b"1"}}}), user({"image": {"source": {"bytes": b"2"}}})),
        (user(tool_result("a", image(b"x" * 9 + b"1"))), user(tool_result("a", image(b"x" * 9 + b"2")))),
        (user(image(b"x")), user(image(b"x", "jpeg"))),
        (user("10000000000000000000000"), user(tool_result("a", {"json": 10**22}))),
        (assistant(tool_use("a", x=float("nan"))), assistant(tool_use("a", x=None))),
        (user(tool_result("a", {"json": [1e999]})), user(tool_result("a", {"json": [-1e999]}))),
    ],
)
def test_different_messages_have_different_digests(one, other):
    assert message_digest(one) != message_digest(other)


@pytest.mark.parametrize("value", [{0: float("nan"), "total": 1}, {0: 2**70, "total": 1}, {(1, 2): 2**70}])
def test_a_message_with_keys_of_several_types_has_a_digest(value):
    one, same = (message_digest(user(tool_result("a", {"json": copy.deepcopy(value)}))) for _ in range(2))
    assert one == same != message_digest(user(tool_result("a", {"json": {**value, "more": 1}})))


def test_canonicalizing_leaves_the_message_unchanged():
    message = assistant(" ", tool_use("a"))
    canonical_content(message)
    assert message == assistant(" ", tool_use("a"))


def test_the_conversation_includes_what_precedes_the_messages():
    base = fingerprint({"system prompt": "s", "tools": None}, [user("x")])
    assert base.key == fingerprint({"system prompt": "s", "tools": None}, [user("x")]).key
    assert base.key != fingerprint({"system prompt": "t", "tools": None}, [user("x")]).key
    assert base.key != fingerprint({"system prompt": "s", "tools": []}, [user("x")]).key


VALUES = st.sampled_from(
    (
        0,
        0.0,
        False,
        None,
        1,
        1.0,
        True,
        "1",
        "",
        float("nan"),
        2**70,
        b"1",
        "\ud800",
        [1],
        (1,),
        {"a": 1, "b": None},
        {1: 1},
    )
)
HISTORIES = st.lists(
    st.tuples(st.sampled_from(("user", "assistant")), st.sampled_from(("text", "x", "cachePoint")), VALUES), max_size=6
)


def as_message(role, kind, value):
    blocks = {"text": {"text": str(value)}, "cachePoint": {"cachePoint": {"type": "default"}}}
    return {"role": role, "content": [blocks.get(kind) or tool_result("a", {"json": value})]}


def as_messages(history):
    return [as_message(*entry) for entry in history]


@given(HISTORIES, HISTORIES, st.integers(0, 6), VALUES, VALUES)
def test_a_known_beginning_gives_the_same_fingerprint(asked, added, kept, system, other_system):
    earlier = fingerprint({"system prompt": system}, as_messages(asked))
    for parts in ({"system prompt": system}, {"system prompt": other_system}):
        later = as_messages([*asked[:kept], *added])
        alone, continued = fingerprint(parts, later), fingerprint(parts, later, earlier)
        assert replace(continued, exact=alone.exact) == alone
        assert len({*alone.chain}) == len(alone.chain)
        assert fingerprint(parts, [*later, user("x")], continued) == fingerprint(parts, [*later, user("x")])


def test_a_long_addition_to_a_known_beginning_takes_linear_time():
    messages = [user(f"message {number}") for number in range(20_000)]
    earlier = fingerprint({}, messages[:1])

    def seconds(*known):
        started = time.process_time()
        fingerprint({}, messages, *known)
        return time.process_time() - started

    assert min(seconds(earlier) for _ in range(3)) < 4 * min(seconds() for _ in range(3))


SCALARS = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(SCALARS, lambda values: st.dictionaries(st.text(), values), max_leaves=10))
def test_any_json_has_a_digest(value):
    assert len(message_digest(user(tool_result("a", {"json": value})))) == 16
