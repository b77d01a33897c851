"""The README and the documentation: snippets run, tables are the code's, public names and commands are documented."""

import asyncio
import copy
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata

import httpx
import pydantic
import pytest
from strands import Agent
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import strands_env.cli
import strands_sglang
import strands_sglang.cli
from strands_env.core import Action, Environment, Observation, StepResult, TaskContext
from strands_env.eval import standard_metrics
from strands_env.rewards import MathReward
from strands_sglang import (
    OUTCOMES,
    SGLangClient,
    SGLangClientError,
    SGLangModel,
    TerminationReason,
    get_tool_parser,
)
from strands_sglang.testing import ScriptedAnswer, ScriptedResponse, ScriptedSGLang
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY
from support import slime as slime_support
from support.agents import call, make_agent
from support.environments import sample
from support.pages import README, ROOT, blocks, names_in_code, run_page, table
from support.slime import check_rollouts

DOCS = ROOT / "docs"
# tests/families, tests/integration and tests/trainers run these: they need a real processor, a cluster, and packages.
ELSEWHERE = {f"docs/guides/{name}.md" for name in ("images", "ray", "reasoning-gym", "harbor")}
ELSEWHERE |= {"docs/start/harbor-task.md"}
PAGES = sorted({"README.md", *(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md"))} - ELSEWHERE)
TEXT = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES if page != "docs/changelog.md")
SHELL_LINES = [line for page in PAGES for block in blocks("bash", ROOT / page) for line in block.text.splitlines()]

# --- snippets ---


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_of_a_page_runs(page, chatml_tokenizer, tmp_path, monkeypatch):
    run_page(ROOT / page, "Qwen/Qwen3-4B-Instruct-2507", chatml_tokenizer, tmp_path, monkeypatch)


def test_the_pages_parser_reads_its_format_and_its_errors():
    [block] = [block for block in blocks("python", DOCS / "understand/tool-calls.md")]
    namespace = {}
    exec(block.text.partition("tokenizer = ")[0], namespace)
    good, bad = get_tool_parser("product_line").parse("First:\nPRODUCT 25 17\nPRODUCT 25")
    TOOL_PARSER_REGISTRY.pop("product_line")
    assert (good.name, good.input) == ("multiply", {"a": 25, "b": 17})
    assert (bad.is_error, bad.raw) == (True, "PRODUCT 25")


MULTIPLY = call("multiply", a=25, b=17)
EPISODES = {
    "an answer after a tool call": ([MULTIPLY, "It is 425."], "COMPLETED"),
    "a wrong answer after a tool call": ([MULTIPLY, "It is 99."], "COMPLETED"),
    "a longer number with the right digits": ([MULTIPLY, "It is 4250."], "COMPLETED"),
    "the limit on tool iterations": ([MULTIPLY] * 9, "TRUNCATED"),
    "an answer that is cut off": ([ScriptedAnswer("25 * 17", finish_reason="length")], "TRUNCATED"),
    "an abort that slime did not ask for": ([ScriptedAnswer("25 * 17", finish_reason="abort")], "TRUNCATED"),
    "an error of the server in the second call": ([MULTIPLY], "FAILED"),
    "an error of the server in the first call": ([], "FAILED"),
}


@pytest.mark.parametrize("end", EPISODES)
def test_the_readmes_generate_leaves_usable_samples(end, chatml_tokenizer, monkeypatch):
    answers, status = EPISODES[end]
    server = ScriptedSGLang(chatml_tokenizer, answers)
    namespace = {}
    slime_support.install_slime(monkeypatch, chatml_tokenizer)

    [block] = [block for block in blocks("python") if block.title == "my_agent.py"]
    block.run(namespace)
    sample = slime_support.Sample(prompt="What is 25 * 17?", label="425", reward=1.0)
    with server.serve() as base_url:
        args = slime_support.slime_args(base_url)
        sample = asyncio.run(namespace["generate"](args, sample, slime_support.slime_sampling_params()))

    check_rollouts(sample, args, chatml_tokenizer)
    assert sample.status is slime_support.Sample.Status[status]
    removed = status == "FAILED" or "abort" in end
    assert sample.remove_sample is removed
    assert sample.reward == (0.0 if removed else None)
    assert any(sample.loss_mask) is not removed
    assert asyncio.run(namespace["reward_func"](args, sample)) == (end == "an answer after a tool call")


# --- the reference ---

PUBLIC_PACKAGES = """
strands_sglang strands_sglang.tool_parsers strands_sglang.testing strands_sglang.trainers.slime strands_sglang.local
strands_env.core strands_env.environments strands_env.eval strands_env.rewards strands_env.sandbox strands_env.utils
""".split()


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_the_reference_has_every_public_name(package):
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    assert sorted(set(importlib.import_module(package).__all__) - documented) == []


def documented_names(owner, section):
    """The entries of a section of a docstring."""
    lines = inspect.cleandoc(owner.__doc__).partition(f"{section}:\n")[2].split("\n\n")[0]
    return [name for line in lines.splitlines() for name in re.findall(r"^    (\w+):", line)]


@pytest.mark.parametrize("function", [SGLangClient.__init__, SGLangModel.__init__, Environment.__init__])
def test_docstrings_list_every_parameter_in_order(function):
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    assert documented_names(function, "Args") == names[1:]


def test_the_configuration_lists_every_option_in_order():
    assert documented_names(SGLangModel.SGLangConfig, "Attributes") == [*SGLangModel.SGLangConfig.__annotations__]


async def test_documented_defaults_are_what_a_model_does(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, ["Hello."], context_length=1000)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    await make_agent(model).invoke_async("Hi!")

    [request] = server.requests
    said = dict(re.findall(r"^ +(\w+):[^:]*?\(default:? (\w+)", SGLangModel.SGLangConfig.__doc__, re.MULTILINE))
    assert type(model.tool_parser) is type(get_tool_parser("auto", tokenizer=chatml_tokenizer))
    assert str(request.body["return_logprob"]) == said["return_logprob"]
    assert str("logprob_start_len" in request.body) == said["return_prompt_logprobs"]
    assert str("return_routed_experts" in request.body) == said.get("return_routed_experts", "False")
    assert request.sampling_params == {"max_new_tokens": 1000 - len(request.input_ids)}
    assert all(value is None for value in model.get_config().values())


# --- tables ---


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_a_page_has_a_head(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert re.match(r"\|.*\n\|[-| ]+\|\n", found), found


def test_the_outcome_table_is_that_of_the_code():
    rows = table("The outcomes", "Outcome", "When", "Reward", "slime status", path=DOCS / "understand/outcomes.md")
    documented = [(row["Outcome"].strip("`"), row["Reward"], row["slime status"]) for row in rows]
    assert documented == [
        (reason.value, outcome.reward.value, outcome.slime_status + (", removed" if outcome.remove_sample else ""))
        for reason, outcome in OUTCOMES.items()
    ]


async def test_the_table_of_masks_and_logprobs_is_what_is_recorded(chatml_tokenizer):
    rows = table(
        "Loss mask and logprob of each token", "Tokens", "Loss mask", "Logprob", path=DOCS / "understand/tokens.md"
    )
    server = ScriptedSGLang(chatml_tokenizer, [MULTIPLY, "It is 425.", '{"product": 425}'])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    namespace = {}
    [block] = [block for block in blocks("python") if block.title == "my_agent.py"]
    block.run(namespace)

    class Answer(pydantic.BaseModel):
        product: int

    await make_agent(model, [namespace["multiply"]]).invoke_async("What is 25 * 17?")
    messages = [{"role": "user", "content": [{"text": "What is 25 * 17?"}]}]
    assert [event async for event in model.structured_output(Answer, messages)] == [{"output": Answer(product=425)}]

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


def test_every_error_has_a_place_in_the_reference():
    documented = (DOCS / "reference/errors.md").read_text(encoding="utf-8")
    errors = [value for value in vars(strands_sglang).values() if isinstance(value, type)]
    assert [e.__name__ for e in errors if issubclass(e, SGLangClientError) and e.__name__ not in documented] == []


def test_the_tool_parsers_that_are_named_are_those_there_are():
    rows = table("Which parser reads them", "Name", "Models", path=DOCS / "understand/tool-calls.md")
    assert {name for row in rows for name in names_in_code(row["Name"])} == set(TOOL_PARSER_REGISTRY)


def test_the_metrics_that_are_named_are_computed():
    results = {prompt: [sample(1.0)] * 4 for prompt in "ab"}
    computed = {
        name.removesuffix("_low") for name in standard_metrics(results, n_samples_per_prompt=4) if name.endswith("_low")
    }
    rows = table("The metrics", "Metric", "Meaning", path=DOCS / "guides/evaluation.md")
    kinds = {re.split(r"[@^]", names_in_code(row["Metric"])[0])[0] for row in rows}
    assert kinds == {re.split(r"[@^]", name)[0] for name in computed}
    assert {"pass@1", "pass@4", "pass^4", "majority@4", "avg@4"} <= computed


async def test_the_verdicts_on_math_are_those_of_the_code():
    columns = ("Answer", "Ground truth", "Verdict", "Why")
    for row in table("How `MathReward` decides", *columns, path=DOCS / "guides/rewards.md"):
        answer, truth, verdict = (row[name].strip("`") for name in columns[:3])
        observation = Observation(messages=[{"role": "assistant", "content": [{"text": f"\\boxed{{{answer}}}"}]}])
        result = StepResult(observation=observation, termination_reason=TerminationReason.TASK_COMPLETE)
        action = Action(message="?", task_context=TaskContext(ground_truth=truth))
        reward = await MathReward().compute(action=action, step_result=result)
        assert (reward.info["verdict"], reward.reward) == (verdict, float(verdict == "correct")), answer


# --- files and commands ---


def test_the_readme_is_short_and_its_links_lead_to_files():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("https://") or (ROOT / target.partition("#")[0]).is_file(), target


def test_every_make_target_that_is_named_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join([*SHELL_LINES, *names_in_code(TEXT)])))
    assert {"demo", "test"} <= named <= targets


def test_every_extra_that_is_named_exists():
    extras = set(metadata.metadata("strands-sglang").get_all("Provides-Extra"))
    assert {name for names in re.findall(r"\.\[([\w,]+)\]", TEXT) for name in names.split(",")} <= extras
    rows = table("Extras", "Extra", "Adds", path=DOCS / "start/install.md")
    assert {name for row in rows for name in names_in_code(row["Extra"])} == extras


def test_every_command_and_option_that_is_named_exists():
    parsers = {"strands-sglang": strands_sglang.cli.build_parser(), "strands-env": strands_env.cli.build_parser()}
    for line in "\n".join([*SHELL_LINES, *names_in_code(TEXT)]).replace("\\\n", " ").splitlines():
        if line.partition(" ")[0] in parsers and " " in line and "@" not in line:
            command, name, *words = shlex.split(line, comments=True)
            [choices] = [action.choices for action in parsers[command]._actions if action.choices]
            assert name in choices, line
            options = {option for action in choices[name]._actions for option in action.option_strings}
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, line


COMMANDS_PAGE = """\
# Commands

Results go to standard output, errors and progress to standard error. Colors appear on a terminal only; `NO_COLOR`
switches them off. Every command of `strands-env` needs the extra `env`, and `strands-sglang serve` the extra `local`.

| Exit code | `strands-sglang` | `strands-env` |
|---|---|---|
| 0 | success, or `serve` was stopped with Ctrl-C | success, every sample is finished |
| 1 | failure; something is unproven (`check`) or wrong (`doctor`) | samples were dropped, or the command failed |
| 2 | an option, or what it names, is wrong | the same |
| 3 | this machine cannot run SGLang | |
| 130 | stopped with Ctrl-C | stopped with Ctrl-C or SIGTERM; finished samples are kept |
| 141 | no one reads the output | the same |
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse aligns options in another way than on the page")
def test_the_page_of_commands_is_what_they_print(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = COMMANDS_PAGE
    for build in (strands_sglang.cli.build_parser, strands_env.cli.build_parser):
        parser = build()
        [choices] = [action.choices for action in parser._actions if action.choices]
        for name, command in choices.items():
            shown = command.format_help()
            assert max(map(len, shown.splitlines())) <= 80
            program, *example = shlex.split(re.search(r"\nexample:\n((?:  .*\n)+)", shown)[1].replace("\\\n", " "))
            assert program == parser.prog and parser.parse_args(example).run == command.get_default("run")
            text += f"\n## {parser.prog} {name}\n\n```text\n{shown}```\n"
    page = DOCS / "reference/commands.md"
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(text, encoding="utf-8")
    updating = "UPDATE_DOCS=1 pytest tests/unit/test_docs.py -k page_of_commands"
    assert page.read_text(encoding="utf-8") == text, f"run: {updating}"


def test_environment_variables_that_are_named_are_read_somewhere():
    folders = (ROOT / "src", ROOT / "examples")
    code = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    for variable in re.findall(r"\b(?:STRANDS_)?SGLANG_[A-Z_]+", TEXT):
        assert f'"{variable}"' in code


def test_the_line_that_tells_this_package_from_the_other_one_does():
    [line] = [line for line in SHELL_LINES if line.startswith("python -c")]
    _, *arguments = shlex.split(line)
    output = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.split() == [strands_sglang.__version__, "True"]


# --- troubleshooting ---

ROWS = table("By message", "What you see", "Why, and what to do", path=DOCS / "troubleshooting.md")


def refuse(request):
    raise httpx.ConnectError("connection refused", request=request)


def other_tokenizer(tokenizer):
    """A tokenizer with one more special token, and with the same template."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"cls_token": "<|other|>"})
    return other


async def ask(model, prompt="Hi!", **kwargs):
    await make_agent(model, **kwargs).invoke_async(prompt)


async def ask_with_another_vocabulary(model):
    await ask(model)
    tokenizer = copy.deepcopy(model.tokenizer)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    words = state["model"]["vocab"]
    words["H"], words["!"] = words["!"], words["H"]  # "Hi!"
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    other = scripted(tokenizer)
    other.trajectory = model.trajectory
    await ask(other)


def scripted(tokenizer, *answers, overrides=(), **kwargs):
    server = ScriptedSGLang(tokenizer, answers or ["Hello."], **kwargs)
    server.overrides.update(overrides)
    return SGLangModel(tokenizer=tokenizer, client=server.client())


def answered_by(tokenizer, answer):
    transport = httpx.MockTransport(answer)
    client = SGLangClient("http://server:30000", transport=transport, max_retries=1, retry_delay=0)
    return SGLangModel(tokenizer=tokenizer, client=client)


# What brings a user into each row's trouble: a function that makes the model, and one that uses it.
PROVOCATIONS = {
    "`pass exactly one of client= and base_url=`": (lambda tokenizer: SGLangModel(tokenizer=tokenizer), ask),
    "`has no chat template`": (
        lambda tokenizer: SGLangModel(
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer),
            base_url="http://server:30000",
        ),
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
        lambda tokenizer: answered_by(tokenizer, refuse),
        ask,
    ),
    "`is this an SGLang server?`": (
        lambda tokenizer: answered_by(tokenizer, lambda request: httpx.Response(200, html="<html>It works!</html>")),
        ask,
    ),
    "`is not the one served at`": (
        lambda tokenizer: SGLangModel(
            tokenizer=other_tokenizer(tokenizer), client=ScriptedSGLang(tokenizer, ["Hello."]).client()
        ),
        ask,
    ),
    "`the tokenizer's match is unproven` (log)": (
        lambda tokenizer: scripted(tokenizer, overrides={"/tokenize": ScriptedResponse(404)}),
        ask,
    ),
    "`recorded with another vocabulary`": (scripted, ask_with_another_vocabulary),
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
async def test_a_user_in_trouble_sees_what_the_page_says(seen, chatml_tokenizer, caplog):
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


async def test_the_cause_of_an_untrimmable_history_has_the_numbers(chatml_tokenizer):
    model = scripted(chatml_tokenizer, context_length=5)
    with pytest.raises(Exception, match="Unable to trim conversation context!") as raised:
        await Agent(model=model, callback_handler=None).invoke_async("Hi!")
    assert "context 5" in str(raised.value.__cause__)


# === docs/architecture.md is true of the code ===


def test_one_call_is_at_most_seven_frames_in_four_files():
    command = [sys.executable, "benchmarks/frames.py", "--frames", "7", "--files", "4"]
    counted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert counted.returncode == 0, counted.stdout + counted.stderr
    documented = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    frames = [line.rpartition(".")[2].rpartition(": ")[2] for line in counted.stdout.splitlines() if ".py: " in line]
    assert [frame for frame in frames if frame not in documented] == []


def test_files_named_for_contributors_exist():
    pages = [DOCS / "architecture.md", *(DOCS / "contribute").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"[\w/]+/\w+\.py\b", page.read_text("utf-8"))}
    folders = (ROOT, ROOT / "src", ROOT / "src/strands_sglang", ROOT / "src/strands_env")
    assert sorted(name for name in named if not any((folder / name).is_file() for folder in folders)) == []


@pytest.mark.parametrize("package", ["strands_sglang", "strands_env"])
def test_the_documented_layers_are_the_import_contracts(package):
    rows = table("Who may import whom", f"`{package}`", "Responsible for", path=DOCS / "architecture.md")
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    [layers] = re.findall(rf'containers = \["{package}"\].*?^layers = \[(.*?)^\]', settings, re.MULTILINE | re.DOTALL)
    assert [names_in_code(row[f"`{package}`"]) for row in rows] == [
        re.findall(r"\w+", line) for line in re.findall(r'"(.*)"', layers)
    ]
