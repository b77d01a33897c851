"""The commands."""

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import strands_sglang
from strands_env.cli import build_parser as env_parser, main as strands_env
from strands_sglang import cli
from strands_sglang.check import check_model, report_lines
from strands_sglang.local.install import COMPLETE_MARKER, environment_directory
from strands_sglang.terminal import COMMANDS
from strands_sglang.testing import ScriptedSGLang
from support.fake_sglang import write_interpreter, write_model
from support.processes import has_ended

PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)
"""A template without tools."""

# === cli ===


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A cache with an environment whose SGLang is a fake; returns a model folder."""
    monkeypatch.setenv("STRANDS_SGLANG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FAKE_SGLANG_PIDS", str(tmp_path / "pids"))
    # Logs of servers that failed are kept, and would stay for good.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for version in ((3, 11), (3, 12), (3, 13)):
        directory = environment_directory(version)
        write_interpreter(directory / "bin" / "python")
        (directory / COMPLETE_MARKER).touch()
    return write_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "strands_sglang.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the local server runs on Linux only")
def test_serve_prints_its_address_and_stops_on_sigterm(installed, tmp_path):
    with start("serve", "--model", installed, "--port", "0") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "stopped" in process.stderr.read()
    assert all(has_ended(int(pid)) for pid in (tmp_path / "pids").read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="the local server runs on Linux only")
def test_serve_ends_with_code_1_when_the_server_dies_under_it(installed, tmp_path):
    with start("serve", "--model", installed, "--port", "0") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        server, child = map(int, (tmp_path / "pids").read_text().split())
        os.kill(server, signal.SIGKILL)
        assert process.wait(30) == 1
        assert "ended by itself with exit code 137" in process.stderr.read()
    assert has_ended(child)


@pytest.mark.skipif(sys.platform != "linux", reason="the local server runs on Linux only")
def test_serve_shows_the_log_of_a_server_that_does_not_start(installed, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_SGLANG_MODE", "dies")
    assert cli.main(["serve", "--model", str(installed), "--port", "0"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert "out of memory" in error


def test_the_check_that_serve_suggests_succeeds_with_a_model_whose_template_has_no_tools(
    folder, chatml_tokenizer, monkeypatch, capsys
):
    settings = Path(folder, "tokenizer_config.json")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": PLAIN_TEMPLATE}))
    Path(folder, "chat_template.jinja").unlink(missing_ok=True)
    with ScriptedSGLang(chatml_tokenizer, ["Hello.", "Hello again."]).serve() as base_url:
        served = SimpleNamespace(base_url=base_url, wait=lambda: 0, log_path="its log")
        monkeypatch.setattr("strands_sglang.local.ensure_sglang", lambda tell: Path("python"))
        monkeypatch.setattr("strands_sglang.local.ensure_smollm2", lambda python, tell: Path(folder))
        monkeypatch.setattr("strands_sglang.local.start_server", lambda *_, **__: nullcontext(served))
        assert cli.main(["serve"]) == 1  # it ends by itself
        command = shlex.split(re.search("try it: (.*)", capsys.readouterr().err)[1])
        assert cli.main(command[1:]) == 0
        assert cli.main(["check", folder]) == 1


def test_serve_refuses_a_folder_without_a_model_with_code_2(tmp_path, capsys):
    assert cli.main(["serve", "--model", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_serve_on_an_unsupported_machine_is_one_line_and_code_3(monkeypatch, capsys):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cli.main(["serve"]) == 3
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert "SGLANG_BASE_URL" in error


@pytest.mark.parametrize("arguments", [["fly"], ["serve", "--port", "high"], ["serve", "--port", "70000"]])
def test_a_wrong_command_line_ends_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments", "told"),
    [
        (cli.main, ["doctr", "x"], "doctr: no such name; did you mean doctor?"),
        (cli.main, ["watch", "x"], "watch is a command of strands-env, not of strands-sglang"),
        (strands_env, ["doctor", "x"], "doctor is a command of strands-sglang, not of strands-env"),
        (cli.main, ["doctor", "x", "--jsn"], "--jsn: no such option; did you mean --json?"),
        (strands_env, ["eval", "--n-sample=3"], "--n-sample: no such option; did you mean --n-samples?"),
        (strands_env, ["track", "x", "--to", "wand"], "wand: no such name; did you mean wandb?"),
        (strands_env, ["list", "x"], "x: unexpected"),
    ],
)
def test_a_mistyped_name_is_told_with_what_may_be_meant(main, arguments, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("build", "name"), [(cli.build_parser, "strands-sglang"), (env_parser, "strands-env")])
def test_each_program_knows_the_commands_of_both(build, name):
    (commands,) = [action.choices for action in build()._actions if action.dest == "command"]
    assert tuple(commands) == COMMANDS[name]


@pytest.mark.parametrize(("command", "main"), [("strands-sglang", cli.main), ("strands-env", strands_env)])
def test_a_bare_command_prints_its_help_and_version_its_version(command, main, capsys):
    assert main([]) == 2
    assert f"usage: {command} COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(rf"{command} \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["view", "doctor", "show"])
def test_help_names_the_commands_that_show_whole_runs(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    assert "strands-env report, watch and compare" in capsys.readouterr().out


def test_help_fits_a_narrow_terminal_but_leaves_examples_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "48")
    with pytest.raises(SystemExit):
        cli.main(["view", "--help"])
    about, examples = capsys.readouterr().out.split("example:")
    assert max(map(len, about.splitlines())) <= 48
    assert "\n  strands-sglang view runs/step-000003 --open\n" in examples


def test_help_names_the_subcommands(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["view", "doctor", "show"])
def test_ctrl_c_is_one_line_and_not_a_sound_file(command, monkeypatch, capsys):
    def interrupted(paths, tokenizer):
        raise KeyboardInterrupt

    monkeypatch.setattr("strands_sglang.inspection.reading.read", interrupted)
    assert cli.main([command, str(EPISODE)]) == 130
    assert capsys.readouterr().err == "strands-sglang: stopped\n"


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (cli.main, ["doctor"]),
        (cli.main, ["view"]),
        (strands_env, ["report"]),
        (strands_env, ["watch"]),
        (strands_env, ["compare", "."]),
        (strands_env, ["replay"]),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_one_line(main, arguments, capsys):
    """As in a folder of another user, but here also for root."""
    assert main([*arguments, "long" * 100]) == 2
    told = capsys.readouterr().err
    assert "File name too long" in told and told.count("\n") == 1


EPISODE = Path(__file__).parent.parent / "fixtures" / "0.5.0" / "trajectories" / "tool_loop.safetensors"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("arguments", [["show", EPISODE], ["--help"]])
def test_unread_or_unwritable_output_gives_no_traceback(arguments):
    """`| head`, and a full disk."""
    command = [sys.executable, "-m", "strands_sglang.cli", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
        said = "strands-sglang: standard output: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (1, said)
        assert subprocess.run(command, stdout=full, stderr=full, env=environment).returncode == 1


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing"])
def test_a_model_folder_that_does_not_exist_is_called_that(model, capsys):
    assert cli.main(["check", model]) == 2
    assert capsys.readouterr().err == f"{model}: no such folder\n"


# === what `strands-sglang check` says of a model, and its exit code ===


MOVES_TOOLS = (  # writes the tools in front of the latest user message
    "{% for m in messages %}{% if loop.last %}{{ tools or '' }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ m.tool_calls or '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(chatml_tokenizer, tmp_path):
    path = tmp_path / "model"
    chatml_tokenizer.save_pretrained(path)
    return str(path)


async def test_a_template_without_tools_is_reported(chatml_tokenizer):
    report = await check_model(chatml_tokenizer, "a-model", chat_template=PLAIN_TEMPLATE)
    assert not report.shows_tools and not report.is_proven
    assert "NOT SHOWN" in "\n".join(report_lines(report))


@pytest.mark.parametrize(("role", "part"), [("system", "system prompt"), ("tool", "tool result")])
async def test_what_a_template_drops_is_unproven(role, part, chatml_tokenizer):
    own = chatml_tokenizer.chat_template
    template = "{% set messages = messages | rejectattr('role', 'equalto', '" + role + "') | list %}" + own
    report = await check_model(chatml_tokenizer, "a-model", chat_template=template)
    assert "drops the" in report.unproven[part]
    assert any(line.startswith(part) and "UNPROVEN" in line for line in report_lines(report))
    assert not report.is_proven


async def test_the_report_names_what_a_rollout_will_use(chatml_tokenizer):
    report = await check_model(chatml_tokenizer, "a-model")
    assert (report.family, report.tool_parser, report.stops) == ("qwen", "hermes", ("<|im_end|>", "<|endoftext|>"))
    assert (report.closes_reasoning, report.rewrites_history) == ("\n</think>\n\n", True)
    assert report.shows_tools
    assert report.unproven == dict.fromkeys(("tool result", "several tool results", "user turn", "cut turn"))
    assert report.is_proven


async def test_the_example_is_the_templates_own_conversation(chatml_tokenizer):
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
    assert report.unproven["user turn"] == "the chat template moves the tools after the turn"
    assert any(line.startswith("user turn") and "UNPROVEN" in line for line in report_lines(report))


async def test_the_report_fits_into_80_columns(chatml_tokenizer):
    report = await check_model(chatml_tokenizer, "a-model", chat_template=MOVES_TOOLS, server="http://127.0.0.1:9")
    lines = list(report_lines(report))
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("FAILED") for line in lines)
    shown = "".join(line[2:] for line in lines if line.startswith("  ") and "·" in line)
    tokens = [repr(token)[1:-1] for piece in report.example for token in piece.tokens]
    assert shown.replace("·", "") == "".join(tokens)


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


def test_check_reaches_a_server_with_an_api_key(folder, chatml_tokenizer, capsys):
    server = ScriptedSGLang(chatml_tokenizer, ["Hello.", "Hello again."])
    with server.serve() as base_url:
        headers = json.dumps({"Authorization": "Bearer key"})
        assert cli.main(["check", folder, "--server", base_url, "--headers", headers]) == 0
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer key"}


def test_check_exits_with_0_if_everything_is_proven(folder, capsys):
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
    assert report["unproven"]["tool result"] == "the chat template moves the tools after the turn"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all"], "/nowhere/at/all: no such folder"),
        (["FOLDER", "--family", "gml"], "--family: there is no model family named 'gml'"),
        (["FOLDER", "--server", "http://localhost:1/v1"], "--server 'http://localhost:1/v1' ends in /v1"),
        (["FOLDER", "--chat-template", "/nowhere.jinja"], "--chat-template /nowhere.jinja"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(folder, arguments, message, capsys):
    given = [folder if argument == "FOLDER" else argument for argument in arguments]
    assert cli.main(["check", *given]) == 2
    assert message in capsys.readouterr().err


# === version ===


def test_importing_says_nothing_and_knows_its_version():
    code = "import strands_sglang\nprint(strands_sglang.__version__)"
    importing = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert importing.stderr == ""
    assert importing.stdout.strip() == metadata.version("strands-sglang")


@pytest.mark.parametrize(("command", "is_told"), [("strands_sglang.cli", 0), ("strands_env.cli", 0), (None, 1)])
def test_commands_do_not_say_that_pytorch_is_missing(command, is_told):
    """The library leaves it to transformers, and to those who import it."""
    code = [
        "import importlib.util, contextlib",
        "find = importlib.util.find_spec",
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)",
        "import strands_sglang",
        f"import {command or 'os'} as command",
        *(["with contextlib.suppress(SystemExit): command.main(['--version'])"] if command else []),
        "import transformers",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS")}
    line = [sys.executable, "-c", "\n".join(code)]
    importing = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert importing.stderr.count("PyTorch") == is_told


def test_a_checkout_without_metadata_has_no_known_version(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.delitem(vars(strands_sglang), "__version__", raising=False)
    try:
        assert strands_sglang.__version__ == "0+unknown"
    finally:
        vars(strands_sglang).pop("__version__", None)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        strands_sglang.no_such_name  # noqa: B018
