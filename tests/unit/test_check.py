"""What `strands-sglang check` says of a model, and its exit code."""

import json

import pytest

from strands_sglang import cli
from strands_sglang.check import check_model, report_lines
from strands_sglang.testing import ScriptedSGLang

MOVES_TOOLS = (  # writes the tools in front of the latest user message
    "{% for m in messages %}{% if loop.last %}{{ tools or '' }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ m.tool_calls or '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(chatml_tokenizer, tmp_path):
    path = tmp_path / "model"
    chatml_tokenizer.save_pretrained(path)
    return str(path)


async def test_the_report_names_what_a_rollout_will_use(chatml_tokenizer):
    report = await check_model(chatml_tokenizer, "a-model")
    assert (report.family, report.tool_parser, report.stops) == ("qwen", "hermes", ("<|im_end|>", "<|endoftext|>"))
    assert (report.closes_reasoning, report.rewrites_history) == ("\n</think>\n\n", True)
    assert report.unproven == dict.fromkeys(("tool result", "several tool results", "user turn", "cut turn"))
    assert report.is_proven


async def test_the_example_is_the_templates_own_conversation_token_by_token(chatml_tokenizer):
    report = await check_model(chatml_tokenizer, "a-model")
    opening, sampled, continuation = report.example
    assert [piece.kind for piece in report.example] == ["opening", "sampled", "continuation"]
    assert "".join(opening.tokens).endswith("How is the weather in Oslo?<|im_end|>\n<|im_start|>assistant\n")
    assert "<tool_call>" in sampled.tokens
    assert sampled.tokens[-1] == "<|im_end|>"
    assert "".join(continuation.tokens).startswith("\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>")


async def test_what_is_unproven_is_named_with_its_reason(chatml_tokenizer):
    report = await check_model(chatml_tokenizer, "a-model", chat_template=MOVES_TOOLS)
    assert not report.is_proven
    assert report.unproven["user turn"] == "the chat template moves the tools behind the turn"
    assert any(line.startswith("user turn") and "UNPROVEN" in line for line in report_lines(report))


async def test_with_a_server_two_turns_are_sampled(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, ["Hello.", "Hello again."], context_length=900)
    with server.serve() as base_url:
        report = await check_model(chatml_tokenizer, "a-model", server=base_url)
    assert report.server is not None and report.is_proven
    assert (report.server.tokenizer_proven, report.server.context_length) == (True, 900)
    assert (report.server.sequences, report.server.reason) == (1, "extends call 0 with 1 new message(s)")
    assert report.server.sampled_tokens == sum(len(response.body["output_ids"]) for response in server.responses)


async def test_a_server_that_is_not_there_makes_the_check_fail(chatml_tokenizer):
    report = await check_model(chatml_tokenizer, "a-model", server="http://127.0.0.1:9")
    assert report.server is not None and report.server.error
    assert not report.is_proven


def test_the_command_prints_the_report_and_exits_with_0_if_all_is_proven(folder, capsys):
    assert cli.main(["check", folder]) == 0
    printed = capsys.readouterr().out
    assert "tool parser      hermes" in printed
    assert "several tool results   proven" in printed


def test_the_command_exits_with_1_if_something_is_unproven(folder, tmp_path, capsys):
    template = tmp_path / "moves.jinja"
    template.write_text(MOVES_TOOLS)
    assert cli.main(["check", folder, "--chat-template", str(template), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_proven"] is False
    assert report["unproven"]["tool result"] == "the chat template moves the tools behind the turn"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all"], "/nowhere/at/all: no such folder"),
        (["FOLDER", "--family", "gml"], "no model family named 'gml'"),
        (["FOLDER", "--chat-template", "/nowhere.jinja"], "--chat-template /nowhere.jinja"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_one_clear_line_and_code_2(folder, arguments, message, capsys):
    given = [folder if argument == "FOLDER" else argument for argument in arguments]
    assert cli.main(["check", *given]) == 2
    assert message in capsys.readouterr().err
