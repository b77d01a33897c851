"""The README"""

import copy
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import httpx
import pytest
from strands import Agent

import strands_env.cli
import strands_sglang
from strands_env.core import Environment, TerminationReason
from strands_env.eval import standard_metrics
from strands_sglang import (
    OUTCOMES,
    SGLangClient,
    SGLangClientError,
    SGLangModel,
    TokenManager,
    TurnStatus,
    get_tool_parser,
)
from strands_sglang.cli import build_parser
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY
from support import slime as slime_support
from support.agents import call, make_agent
from support.environments import sample
from support.readme import README, ROOT, blocks, names_in_code, table
from support.slime import check_rollouts

# === the README: its snippets run, its tables and troubles are the code's, and its files and commands exist ===


DOCUMENTED_URL = "http://localhost:30000"
DOCUMENTED_MODEL = "Qwen/Qwen3-4B-Instruct-2507"

TEXT = README.read_text(encoding="utf-8")
PYTHON_BLOCKS = blocks("python")
SHELL_LINES = [line for block in blocks("bash") for line in block.text.splitlines()]


# --- snippets ---


def sampled_text(request):
    """What a model that does as it is told would sample for the README's prompts."""
    if "json_schema" in request.sampling_params:
        return '{"product": 425}'
    _, _, question = request.text.rpartition("<|im_start|>user\n")
    if "<tool_response>" in question:
        return "25 * 17 is 425."
    factors = re.search(r"(\d+) \* (\d+)", question)
    if factors is None or '"multiply"' not in request.text:
        return "I don't know."
    return call("multiply", a=int(factors[1]), b=int(factors[2]))


@pytest.fixture(scope="module")
def snippets(chatml_tokenizer, tmp_path_factory):
    """What running all snippets in their order left: their `namespace`, the `failures` by line, the `server`."""
    folder = tmp_path_factory.mktemp("model")
    chatml_tokenizer.save_pretrained(folder)
    namespace = {"__name__": "readme"}
    failures = {}
    server = ScriptedSGLang(chatml_tokenizer, sampled_text)
    with pytest.MonkeyPatch.context() as patch, server.serve() as base_url:
        slime_support.install_slime(patch, chatml_tokenizer)

        def localised(text):
            return text.replace(DOCUMENTED_URL, base_url).replace(DOCUMENTED_MODEL, str(folder))

        for block in PYTHON_BLOCKS:
            try:
                block.run(namespace, localised)
            except Exception as error:
                failures[block.line] = error
        yield {"namespace": namespace, "failures": failures, "server": server}
    TOOL_PARSER_REGISTRY.pop("product_line", None)


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: f"{block.section}, line {block.line}")
def test_every_python_snippet_runs(block, snippets):
    if block.line in snippets["failures"]:
        raise snippets["failures"][block.line]


def test_the_snippets_agents_call_their_tool_and_answer(snippets):
    asked = [request.text for request in snippets["server"].requests]
    assert any("<tool_response>\n425\n</tool_response>" in text for text in asked)


def test_the_readmes_parser_reads_its_format_and_tells_errors(snippets):
    good, bad = get_tool_parser("product_line").parse("First:\nPRODUCT 25 17\nPRODUCT 25")
    assert (good.name, good.input) == ("multiply", {"a": 25, "b": 17})
    assert (bad.is_error, bad.raw) == (True, "PRODUCT 25")


MULTIPLY = call("multiply", a=25, b=17)
EPISODES = {
    "an answer after a tool call": ([MULTIPLY, "It is 425."], "COMPLETED"),
    "the limit on tool iterations": ([MULTIPLY] * 9, "TRUNCATED"),
    "an answer that is cut off": ([ScriptedAnswer("25 * 17", finish_reason="length")], "TRUNCATED"),
    "an abort that slime did not ask for": ([ScriptedAnswer("25 * 17", finish_reason="abort")], "TRUNCATED"),
    "an error of the server in the second call": ([MULTIPLY], "FAILED"),
    "an error of the server in the first call": ([], "FAILED"),
}


@pytest.mark.parametrize("end", EPISODES)
async def test_the_readmes_generate_leaves_samples_that_slime_can_use(end, snippets, chatml_tokenizer, monkeypatch):
    answers, status = EPISODES[end]
    server = ScriptedSGLang(chatml_tokenizer, answers)
    namespace = snippets["namespace"]
    slime_support.install_slime(monkeypatch, chatml_tokenizer)

    sample = slime_support.Sample(prompt="What is 25 * 17?", label="425", reward=1.0)
    with server.serve() as base_url:
        args = slime_support.slime_args(base_url)
        sample = await namespace["generate"](args, sample, slime_support.slime_sampling_params())

    check_rollouts(sample, args, chatml_tokenizer)
    assert sample.status is slime_support.Sample.Status[status]
    removed = status == "FAILED" or "abort" in end
    assert sample.remove_sample is removed
    assert sample.reward == (0.0 if removed else None)
    assert any(sample.loss_mask) is not removed
    assert await namespace["reward_func"](args, sample) == float("425" in sample.response and not removed)


# --- tables ---


def test_the_model_table_has_every_parameter_in_order():
    rows = table("Parameters of SGLangModel", "Parameter", "Default", "Meaning")
    parameters = inspect.signature(SGLangModel).parameters.values()
    constructor = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    documented = [name for row in rows for name in names_in_code(row["Parameter"])]
    assert documented == [*constructor, *SGLangModel.SGLangConfig.__annotations__]


async def test_the_model_tables_defaults_are_what_a_model_does(chatml_tokenizer):
    rows = table("Parameters of SGLangModel", "Parameter", "Default", "Meaning")
    default = {names_in_code(row["Parameter"])[0]: row["Default"].strip("`") for row in rows}
    server = ScriptedSGLang(chatml_tokenizer, ["Hello."], context_length=1000)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    await make_agent(model).invoke_async("Hi!")

    [request] = server.requests
    assert type(model.tool_parser) is type(get_tool_parser("auto", tokenizer=chatml_tokenizer))
    assert str(request.body["return_logprob"]) == default["return_logprob"]
    assert str("logprob_start_len" in request.body) == default["return_prompt_logprobs"]
    assert str("return_routed_experts" in request.body) == default["return_routed_experts"]
    assert request.sampling_params == {"max_new_tokens": 1000 - len(request.input_ids)}
    assert default["tokenizer"] == "required"
    given = {"tokenizer", "return_logprob", "return_prompt_logprobs", "return_routed_experts"}
    assert {value for name, value in default.items() if name not in given} == {"None"}
    assert all(value is None for value in model.get_config().values())


def test_the_client_table_has_every_parameter_with_its_default():
    rows = table("Parameters of SGLangClient", "Parameter", "Default", "Meaning")
    documented = [(row["Parameter"].strip("`"), row["Default"].strip("`")) for row in rows]
    parameters = inspect.signature(SGLangClient).parameters.values()
    assert documented == [
        (parameter.name, "required" if parameter.default is parameter.empty else repr(parameter.default))
        for parameter in parameters
    ]


def test_the_outcome_table_is_that_of_the_code():
    rows = table("How episodes end", "Outcome", "When", "Reward", "slime status")
    documented = [(row["Outcome"].strip("`"), row["Reward"], row["slime status"]) for row in rows]
    assert documented == [
        (reason.value, outcome.reward.value, outcome.slime_status + (", removed" if outcome.remove_sample else ""))
        for reason, outcome in OUTCOMES.items()
    ]


def test_the_table_of_the_token_manager_names_its_attributes():
    rows = table("What is recorded", "Attribute", "Value")
    public = [name for name, value in vars(TokenManager).items() if isinstance(value, property)]
    assert sorted(row["Attribute"].strip("`") for row in rows) == sorted(public)


async def test_the_table_of_a_turn_names_its_attributes_and_every_status(chatml_tokenizer):
    rows = table("What is recorded", "Attribute of a turn", "Value")
    model = SGLangModel(tokenizer=chatml_tokenizer, client=ScriptedSGLang(chatml_tokenizer, ["Hello."]).client())
    await make_agent(model).invoke_async("Hi!")
    [turn] = model.trajectory.turns
    for row in rows:
        assert hasattr(turn, row["Attribute of a turn"].strip("`"))
    [statuses] = [row["Value"] for row in rows if row["Attribute of a turn"] == "`status`"]
    assert set(names_in_code(statuses)) == {status.value for status in TurnStatus}


async def test_the_table_of_masks_and_logprobs_is_what_is_recorded(chatml_tokenizer, snippets):
    rows = table("What is recorded", "Tokens", "Loss mask", "Logprob")
    server = ScriptedSGLang(chatml_tokenizer, [MULTIPLY, "It is 425.", '{"product": 425}'])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    multiply, answer = snippets["namespace"]["multiply"], snippets["namespace"]["Answer"]
    await make_agent(model, [multiply]).invoke_async("What is 25 * 17?")
    messages = [{"role": "user", "content": [{"text": "What is 25 * 17?"}]}]
    assert [event async for event in model.structured_output(answer, messages)] == [{"output": answer(product=425)}]

    conversation, constrained = model.trajectory.sequences(auxiliary=True)
    opening, first, observation, second = conversation.segments
    recorded = [(opening, 0), (observation, None), (first, 0), (constrained.segments[1], 2)]
    for row, (segment, response) in zip(rows, recorded, strict=True):
        assert str(segment.loss_mask) == row["Loss mask"]
        if row["Logprob"] == "the server's":
            entries = server.responses[response].body["meta_info"]["output_token_logprobs"]
            assert segment.logprobs == [entry[0] for entry in entries]
        else:
            assert {repr(logprob) for logprob in segment.logprobs} == {row["Logprob"].strip("`")}
    assert second.token_ids[-1] == chatml_tokenizer.eos_token_id


def test_the_errors_that_are_named_are_one_family():
    def _is_client_error(value):
        return isinstance(value, type) and issubclass(value, SGLangClientError)

    named = {name for name in re.findall(r"`(\w+Error)`", TEXT) if hasattr(strands_sglang, name)}
    family = {name for name in vars(strands_sglang) if _is_client_error(getattr(strands_sglang, name))}
    assert named == family


def test_the_tool_parsers_that_are_named_are_those_there_are():
    section = TEXT.partition("## Tool parsers\n")[2].partition("\n## ")[0]
    named = {name for name in names_in_code(section) if name in TOOL_PARSER_REGISTRY}
    assert named == set(TOOL_PARSER_REGISTRY) - {"product_line"}


# --- files and commands ---


def test_links_lead_to_files_of_the_repository_or_to_public_pages():
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if target.startswith("#"):
            headings = [line.lower() for line in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)]
            assert target[1:].replace("-", " ") in headings
        else:
            assert target.startswith("https://") or (ROOT / target).is_file(), target


def test_every_make_target_that_is_named_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join([*SHELL_LINES, *names_in_code(TEXT)])))
    assert {"demo", "test"} <= named <= targets


def test_every_extra_that_is_named_exists():
    extras = metadata.metadata("strands-sglang").get_all("Provides-Extra")
    assert {"local", "dev"} <= set(extras)
    assert set(re.findall(r"\.\[(\w+)\]", TEXT)) <= set(extras)


def test_the_command_that_is_named_takes_what_is_named():
    arguments = build_parser().parse_args(["serve", "--model", "folder"])
    assert "`strands-sglang serve`" in TEXT and "`--model PATH`" in TEXT
    assert str(arguments.model) == "folder"


def test_options_and_variables_that_are_named_are_read_somewhere():
    conftests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("conftest.py"))
    assert 'addoption("--sglang-base-url"' in re.sub(r"\(\s+", "(", conftests)
    folders = (ROOT / "src", ROOT / "examples")
    code = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    for variable in re.findall(r"\b(?:STRANDS_)?SGLANG_[A-Z_]+", TEXT):
        assert f'"{variable}"' in code


def test_the_line_that_tells_this_package_from_the_other_one_does():
    [line] = [line for line in SHELL_LINES if line.startswith("python -c")]
    _, *arguments = shlex.split(line)
    output = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.split() == [strands_sglang.__version__, "True"]


ROWS = table("Troubleshooting", "What you see", "Why, and what to do")
Provocation = Callable[[Any], Awaitable[SGLangModel | None]]

HTML = httpx.MockTransport(lambda request: httpx.Response(200, html="<html>It works!</html>"))


def refuse(request):
    raise httpx.ConnectError("connection refused", request=request)


class WithoutTokenize(httpx.AsyncBaseTransport):
    """A server behind a router that does not know `/tokenize`."""

    def __init__(self, server):
        self.inner = server.transport()

    async def handle_async_request(self, request):
        if request.url.path == "/tokenize":
            return httpx.Response(404, json={"detail": "Not Found"}, request=request)
        return await self.inner.handle_async_request(request)


def other_tokenizer(tokenizer):
    """A tokenizer with one more special token, and with the same template."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"cls_token": "<|other|>"})
    return other


def base_tokenizer(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    return other


async def ask(model, prompt="Hi!", **kwargs):
    await make_agent(model, **kwargs).invoke_async(prompt)


def scripted(tokenizer, *answers, **kwargs):
    server = ScriptedSGLang(tokenizer, answers or ["Hello."], **kwargs)
    return SGLangModel(tokenizer=tokenizer, client=server.client())


def on_transport(tokenizer, transport):
    client = SGLangClient("http://server:30000", transport=transport, max_retries=1, retry_delay=0)
    return SGLangModel(tokenizer=tokenizer, client=client)


# What brings a user into each row's trouble: a function that makes the model, and one that uses it.
PROVOCATIONS = {
    "`pass exactly one of client= and base_url=`": (lambda tokenizer: SGLangModel(tokenizer=tokenizer), ask),
    "`has no chat template`": (
        lambda tokenizer: SGLangModel(tokenizer=base_tokenizer(tokenizer), base_url="http://server:30000"),
        ask,
    ),
    "`there is no tool parser named`": (
        lambda tokenizer: SGLangModel(tokenizer=tokenizer, base_url="http://server:30000", tool_parser="hermse"),
        ask,
    ),
    "`base_url ... ends in /v1`": (
        lambda tokenizer: SGLangModel(tokenizer=tokenizer, base_url="http://server:30000/v1"),
        ask,
    ),
    "`no server has ever answered there`": (
        lambda tokenizer: on_transport(tokenizer, httpx.MockTransport(refuse)),
        ask,
    ),
    "`is this an SGLang server?`": (lambda tokenizer: on_transport(tokenizer, HTML), ask),
    "`is not the one served at`": (
        lambda tokenizer: SGLangModel(
            tokenizer=other_tokenizer(tokenizer), client=ScriptedSGLang(tokenizer, ["Hello."]).client()
        ),
        ask,
    ),
    "`the tokenizer's match is unproven` (log)": (
        lambda tokenizer: on_transport(tokenizer, WithoutTokenize(ScriptedSGLang(tokenizer, ["Hello."]))),
        ask,
    ),
    "`no room is left for an answer`": (lambda tokenizer: scripted(tokenizer, context_length=5), ask),
    "`Unable to trim conversation context!`": (
        lambda tokenizer: scripted(tokenizer, context_length=5),
        lambda model: Agent(model=model, callback_handler=None).invoke_async("Hi!"),
    ),
    "`cannot put a ... block in front of the model`": (
        scripted,
        lambda model: ask(model, [{"image": {"format": "png", "source": {"bytes": b"PNG"}}}]),
    ),
    "`MaxTokensReachedException`": (
        lambda tokenizer: scripted(tokenizer, ScriptedAnswer("Hello", finish_reason="length")),
        ask,
    ),
    "`the server aborted the request`": (
        lambda tokenizer: scripted(tokenizer, ScriptedAnswer("Hello", finish_reason="abort")),
        ask,
    ),
}


def test_there_is_a_provocation_for_every_row():
    assert [row["What you see"] for row in ROWS] == list(PROVOCATIONS)


@pytest.mark.parametrize("seen", PROVOCATIONS)
async def test_a_user_in_trouble_sees_what_the_readme_says(seen, chatml_tokenizer, caplog):
    nothing_sampled = [row["What you see"] for row in ROWS[:7]] + ["`no room is left for an answer`"]
    make, use = PROVOCATIONS[seen]
    model = None
    told = []
    try:
        model = make(chatml_tokenizer)
        await use(model)
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
    told += caplog.messages

    [phrase] = names_in_code(seen)
    pattern = ".*".join(re.escape(part) for part in phrase.split("..."))
    assert any(re.search(pattern, message) for message in told), told
    if model is not None and seen in nothing_sampled:
        assert not any(model.token_manager.loss_mask)
        assert all(turn.generation is None for turn in model.trajectory.turns)


async def test_the_cause_of_a_history_that_cannot_be_trimmed_holds_the_numbers(chatml_tokenizer):
    model = scripted(chatml_tokenizer, context_length=5)
    with pytest.raises(Exception, match="Unable to trim conversation context!") as raised:
        await Agent(model=model, callback_handler=None).invoke_async("Hi!")
    assert "context 5" in str(raised.value.__cause__)


async def test_the_turns_say_why_a_second_sequence_appeared(chatml_tokenizer, capsys):
    model = scripted(chatml_tokenizer, "One.", "Two.", "Three.", "Four.")
    agent = make_agent(model)
    await agent.invoke_async("First?")
    await agent.invoke_async("Second?")
    agent.messages[0]["content"][0]["text"] = "Third?"
    await agent.invoke_async("Fourth?")
    agent.system_prompt = "Be long."
    await agent.invoke_async("Fifth?")
    assert len(model.trajectory.sequences()) == 3

    [snippet] = [block for block in blocks("python") if block.section == "Troubleshooting"]
    snippet.run({"model": model})
    printed = capsys.readouterr().out
    explained = README.read_text(encoding="utf-8").partition("**A second sequence appeared.**")[2]
    explained = explained.partition("```\n\n")[2].partition("\n## ")[0]
    for reason in [name for name in names_in_code(explained) if " " in name]:
        assert reason in printed


# === docs/architecture.md is true of the code ===


def test_one_call_is_at_most_seven_frames_in_four_files():
    command = [sys.executable, "benchmarks/frames.py", "--frames", "7", "--files", "4"]
    counted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert counted.returncode == 0, counted.stdout + counted.stderr
    documented = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    frames = [line.rpartition(".")[2].rpartition(": ")[2] for line in counted.stdout.splitlines() if ".py: " in line]
    assert [frame for frame in frames if frame not in documented] == []


# === its sections on environments and evaluation: limits, metrics, commands and options are the code's ===


def test_the_table_of_limits_has_every_one_with_its_default() -> None:
    parameters = inspect.signature(Environment).parameters
    bounds = [name for name in parameters if name.startswith(("max_", "retr")) or name.endswith("_timeout")]
    rows = table("Environments", "Argument", "Default", "What it bounds")
    documented = {names_in_code(row["Argument"])[0]: row["Default"].strip("`") for row in rows}
    assert sorted(documented) == sorted(bounds)
    reasons = documented.pop("retry_on")
    assert parameters["retry_on"].default == (TerminationReason[reasons],)
    assert documented == {name: str(parameters[name].default) for name in documented}


def test_the_metrics_that_are_named_are_computed() -> None:
    results = {prompt: [sample(1.0)] * 4 for prompt in "ab"}
    metrics = standard_metrics(results, n_samples_per_prompt=4)
    named = {names_in_code(row["Metric"])[0] for row in table("Evaluation", "Metric", "Meaning")}
    computed = {name.removesuffix("_low") for name in metrics if name.endswith("_low")}
    assert {name.split("@")[0].split("^")[0] for name in named} == {
        name.split("@")[0].split("^")[0] for name in computed
    }
    assert {"pass@1", "pass@4", "pass^4", "majority@4", "avg@4"} <= computed


def test_the_commands_that_are_named_are_those_there_are_and_the_shown_lines_are_understood() -> None:
    parser = strands_env.cli.build_parser()
    commands = re.findall(r"^    (\w+) ", parser.format_help(), re.MULTILINE)
    rows = table("Evaluation", "Command", "What it does")
    assert [names_in_code(row["Command"])[0].split()[1] for row in rows] == commands
    shown = [line for block in blocks("bash") for line in block.text.splitlines() if line.startswith("strands-env ")]
    assert len(shown) == 2
    for line in shown:
        parser.parse_args(shlex.split(line)[1:])
