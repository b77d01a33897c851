"""The README's sections on environments and evaluation: their limits, metrics, commands and options are the code's."""

import inspect
import re
import shlex

from strands_env.cli import build_parser
from strands_env.core import Environment, TerminationReason
from strands_env.eval import standard_metrics
from support.environments import sample
from support.readme import blocks, names_in_code, table


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
    parser = build_parser()
    commands = re.findall(r"^    (\w+) ", parser.format_help(), re.MULTILINE)
    rows = table("Evaluation", "Command", "What it does")
    assert [names_in_code(row["Command"])[0].split()[1] for row in rows] == commands
    shown = [line for block in blocks("bash") for line in block.text.splitlines() if line.startswith("strands-env ")]
    assert len(shown) == 2
    for line in shown:
        parser.parse_args(shlex.split(line)[1:])
