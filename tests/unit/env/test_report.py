"""The pages of evaluations: their numbers are those of the commands, and bad input is reported or left out."""

import asyncio
import itertools
import json
import os
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from strands_env.cli import main
from strands_env.core import Environment, RewardResult
from strands_env.eval import Evaluator, read_results, standard_metrics
from strands_env.eval.metrics import Prices, compare
from strands_env.report import comparison_page, prompt_values, report_page
from strands_sglang import SGLangModel, __version__
from strands_sglang.cli import main as show_main
from strands_sglang.messages.said import said_in
from strands_sglang.testing import ScriptedSGLang
from support.environments import Contains, StubEnvironment, lines, sample, step_result, tasks
from unit.viewer.test_page import Page


def evaluated(path, results, count=3, n_samples=4, **options):
    """An evaluation whose samples have these results, over and over."""
    played = itertools.cycle(results)
    stub = StubEnvironment(lambda action: next(played))
    asyncio.run(Evaluator(stub.factory, n_samples, output_path=path, **options).run(tasks(count)))
    return path


def asked(tokenizer, path, **options):
    """An evaluation of two tasks by a model that always says 0; returns its server."""
    server = ScriptedSGLang(tokenizer, ["It is 0."] * 4)
    model = SGLangModel(tokenizer=tokenizer, client=server.client())
    evaluator = Evaluator(
        lambda action: Environment(lambda: model, Contains()), 2, max_concurrency=1, output_path=path, **options
    )
    asyncio.run(evaluator.run(tasks(2)))
    return server


def report_of(*paths, threshold=1.0):
    page = report_page if len(paths) == 1 else comparison_page
    return Page(page(*paths, success_threshold=threshold)).index


def told(capsys, *arguments):
    """The exit code and the error line of a command."""
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def save_records(path, records):
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))


def change_records(folder, change):
    """Change each record of an evaluation; `change` gets its number too."""
    records = lines(folder / "results.jsonl")
    for number, record in enumerate(records):
        change(number, record)
    save_records(folder / "results.jsonl", records)


LOST = step_result(None, reason="infrastructure_error")
MIXED = [
    step_result(1.0, "4"),
    step_result(0.0, "5"),
    LOST,
    step_result(0.5, "4", reason="max_tokens_reached"),
    step_result(None, "7", error="a tool is broken"),
]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_metric_is_the_mean_of_its_values_by_prompt(data):
    n = data.draw(st.integers(1, 5))
    one = st.tuples(st.sampled_from([0.0, 1.0, 0.5, -2.0, None]), st.sampled_from("45"), st.booleans())
    results = {
        f"p{i}": [
            sample(reward, text, finished=finished or reward is not None, prompt=f"p{i}", is_errored=reward is None)
            for reward, text, finished in data.draw(st.lists(one, max_size=n))
        ]
        for i in range(data.draw(st.integers(1, 4)))
    }
    metrics = standard_metrics(results, n_samples_per_prompt=n)
    values = prompt_values(results, n_samples_per_prompt=n, success_threshold=1.0)
    names = [name for name in metrics if f"{name}_dropped_prompts" in metrics]
    assert set(names) == set(values)
    for name, of in values.items():
        assert metrics[name] == pytest.approx(np.mean(list(of.values())))
        assert metrics[f"{name}_prompts"] == len(of)


def test_the_page_says_what_the_command_says(tmp_path, capsys):
    evaluated(tmp_path / "a", MIXED)
    index = report_of(tmp_path / "a")
    report = index["report"]
    main(["report", str(tmp_path / "a")])
    printed = capsys.readouterr().out
    for row in report["tables"][0]["rows"]:
        assert " ".join(row) in " ".join(printed.split())
    [shown] = [row for row in report["tables"][0]["rows"] if row[0] == "pass@1"]
    assert shown[2] == "0.000 to 1.000"  # which says nothing
    assert report["headline"] == f"pass@1 {shown[1]} · 10 of 12 samples, not running"
    assert "UTC, so far " in dict(report["about"])["Started"]
    assert "dropped" in report["notes"][0] and report["notes"][1] == "Dropped: 2 x infrastructure_error."
    assert report["notes"][2].startswith("Errored: 2 x a tool is broken") and "in no metric" in report["notes"][3]
    [seconds] = [plot["says"] for plot in report["plots"] if plot["title"] == "Seconds"]
    assert sum(int(part.split(": ")[1]) for part in seconds.split(" more. ")[1].split(", ")) == int(
        report["notes"][0].split()[5]
    )
    outcomes = {name: int(count) for name, count, _ in report["tables"][1]["rows"]}
    assert sum(outcomes.values()) == 12 and outcomes["infrastructure_error"] >= 2
    _, results = read_results(tmp_path / "a")
    for task in report["tasks"]:
        for (shown, number), one in zip(task["samples"][0], results[task["name"]], strict=True):
            assert index["episodes"][number]["key"] == one.key
            assert shown == ("–" if one.reward is None else f"{one.reward:.3g}")


def test_a_task_is_named_by_how_often_it_is_solved(tmp_path):
    played = [step_result(reward, "4") for reward in (1.0, 1.0, 0.0, 0.0, 1.0, 0.0)]
    evaluated(tmp_path / "a", played, count=3, n_samples=2, max_concurrency=1)
    states = [task["state"] for task in report_of(tmp_path / "a")["report"]["tasks"]]
    assert states == ["always solved", "never solved", "sometimes solved"]


def test_a_task_with_dropped_samples_says_how_many(tmp_path):
    played = [step_result(1.0), LOST, LOST, *[step_result(1.0)] * 3]
    evaluated(tmp_path / "a", played, count=2, n_samples=3, max_concurrency=1)
    report = report_of(tmp_path / "a")["report"]
    dropped = [task["facts"][report["facts"].index("Dropped")] for task in report["tasks"]]
    assert ([task["state"] for task in report["tasks"]], dropped) == (["always solved"] * 2, [2, None])
    assert any("in no metric and no state" in note for note in report["notes"])


def test_a_value_if_dropped_samples_failed_names_its_prompts_where_they_are_others(tmp_path):
    evaluated(tmp_path, [*[step_result(1.0)] * 3, LOST, LOST, LOST], count=3, n_samples=2, max_concurrency=1)
    rows = {row[0]: row[3:] for row in report_of(tmp_path)["report"]["tables"][0]["rows"]}
    assert rows["pass@1"] == ["2", "0.500, 3 prompts"] and rows["pass@2"] == ["1", "0.667, 3 prompts"]
    evaluated(tmp_path / "b", [step_result(1.0), LOST], count=1, n_samples=2, max_concurrency=1)
    [[*_, told], *_] = report_of(tmp_path / "b")["report"]["tables"][0]["rows"]
    assert told == "0.500"


def test_costs_are_those_of_the_tokens_that_servers_counted(chatml_tokenizer, tmp_path, capsys):
    server = asked(chatml_tokenizer, tmp_path)
    assert main(["report", str(tmp_path), "--prices", "3, 1, 10", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    turns = [json.loads(record)["observation"]["metrics"] for record in open(tmp_path / "results.jsonl")]
    prompts, cached, sampled = (
        sum(turn[name] for turn in turns) for name in ("input_tokens", "cached_tokens", "sampled_tokens")
    )
    assert prompts == sum(len(request.input_ids) for request in server.requests if not request.is_prefill) > cached > 0
    total = (3 * (prompts - cached) + cached + 10 * sampled) / 1e6
    told = [metrics[name] for name in ("cost", "cost_per_sample", "cost_per_solved_prompt")]
    assert told == pytest.approx([total, total / 4, total])  # of 0 + 0 and 1 + 1, one is solved
    page = Page(report_page(tmp_path, success_threshold=1.0, prices=Prices(3, 1, 10)))
    rows = {row[0]: row[1] for row in page.index["report"]["tables"][2]["rows"]}
    assert (rows["Prompt tokens"], rows["Cost of tokens per solved task"]) == (f"{prompts:,}", f"{total:.3g}")
    assert float(rows["Cost of tokens, in the currency of --prices"]) == pytest.approx(total, rel=0.01)


def test_plots_are_svg_without_scripts_styles_and_addresses(tmp_path):
    played = [step_result(reward) for reward in np.linspace(-1, 1, 16)]
    evaluated(tmp_path, played, count=4)
    # Measured seconds may all be equal.
    change_records(tmp_path, lambda number, record: record.update(seconds=float(number)))
    report = report_of(tmp_path)["report"]
    plots = [*report["plots"], *filter(None, report["metrics"].values())]
    assert {"Rewards", "Seconds", "pass@k with 95 % intervals"} <= {plot["title"] for plot in plots}
    for plot in plots:
        assert plot["says"]
        for element in ElementTree.fromstring(plot["svg"]).iter():
            assert element.tag.split("}")[1] in {"svg", "g", "rect", "line", "text", "path"}
            assert not {"style", "href", "onload"} & set(element.attrib)
    [rewards] = [plot for plot in report["plots"] if plot["title"] == "Rewards"]
    assert rewards["svg"].count("<rect") == 1 + 11  # ranges of 0.2 from -1 to 1


def test_bars_are_as_far_apart_as_their_values(tmp_path):
    evaluated(tmp_path, [step_result(1.0)], 1, 10)
    sampled = (10, 11, 12, 13, 50, 51, 52, 53, 91, 124)
    change_records(tmp_path, lambda n, record: record["observation"]["metrics"].update(sampled_tokens=sampled[n]))
    [plot] = [plot for plot in report_of(tmp_path)["report"]["plots"] if plot["title"] == "Sampled tokens"]
    counts = "0: 4, 20: 0, 40: 4, 60: 0, 80: 1, 100: 0, 120: 1"
    assert plot["says"] == f"Number of samples, each bar from its label to 20 more. {counts}"


def test_rewards_of_0_and_1_are_labels_and_no_ranges(tmp_path):
    [plot, *_] = report_of(evaluated(tmp_path, MIXED[:2], 1, 4))["report"]["plots"]
    assert (plot["title"], plot["says"]) == ("Rewards", "Number of samples. 0: 2, 1: 2")
    texts = [element.text for element in ElementTree.fromstring(plot["svg"]).iter() if element.text]
    assert {"0", "1", "Rewards"} <= {*texts}


def test_a_curve_has_the_same_prompts_at_each_k(tmp_path):
    played = [step_result(1.0)] * 4 + [step_result(0.0), step_result(0.0), LOST, LOST]
    evaluated(tmp_path, played, 2, 4, max_concurrency=1)
    plot = report_of(tmp_path)["report"]["metrics"]["pass@1"]
    assert plot["says"] == "pass@1: 0.500, pass@2: 0.500"  # and not pass@4: 1.000, of one prompt


def test_a_run_whose_server_does_not_answer_says_so_in_its_headline(tmp_path):
    evaluated(tmp_path, MIXED, 1, 3)
    plan = json.loads((tmp_path / "results.run.json").read_text())
    (tmp_path / "results.run.json").write_text(json.dumps({**plan, "n_samples_per_prompt": 20}))
    (tmp_path / "results.status.json").write_text(
        json.dumps({"began": {}, "left": 3, "outages": ["http://one is silent"]})
    )
    assert report_of(tmp_path)["report"]["headline"].endswith("samples, running: http://one is silent")


def test_a_killed_run_lasted_until_its_last_change(tmp_path):
    evaluated(tmp_path, MIXED, 1, 3)
    began = min(one["ended_at"] - one["seconds"] for one in lines(tmp_path / "results.jsonl"))
    (tmp_path / "results.status.json").write_text("{}")
    os.utime(tmp_path / "results.status.json", (began + 700,) * 2)
    assert float(dict(report_of(tmp_path)["report"]["about"])["Started"].split()[-2]) == pytest.approx(700, abs=1)


def test_no_column_is_without_values(tmp_path):
    head = report_of(evaluated(tmp_path, MIXED[:2]))["report"]["tables"][0]["head"]
    assert head == ["metric", "value", "95 % interval", "prompts"]


def test_a_single_value_has_no_plot(tmp_path):
    plots = report_of(evaluated(tmp_path, [step_result(1.0)]))["report"]["plots"]
    assert "Rewards" not in {plot["title"] for plot in plots}


def test_a_conversation_begins_with_its_system_prompt_and_history(tmp_path):
    evaluated(tmp_path, [step_result(1.0)], 1, 1)
    [record] = lines(tmp_path / "results.jsonl")
    record["environment"] = {"system_prompt": "Be brief."}
    record["task_context"]["conversation_history"] = [{"role": "user", "content": "Hi."}]
    save_records(tmp_path / "results.jsonl", [record])
    page = Page(report_page(tmp_path, success_threshold=1.0))
    said = [part[:3] for part in page.body(0)["said"]]
    assert said[:2] == [["system", "text", "Be brief."], ["user", "text", "Hi."]]
    assert said[2:] == [list(part[:3]) for part in said_in(record["observation"]["messages"])]


def test_the_page_says_what_was_evaluated(tmp_path):
    config = {"model_id": "Qwen/Qwen3-8B", "env": "calculator", "sampling_params": {"temperature": 0.7}}
    evaluated(tmp_path, MIXED[:2], config=config)
    index = report_of(tmp_path)
    assert index["title"] == "Qwen3-8B"
    about = dict(index["report"]["about"])
    assert (about["Model"], about["Environment"]) == ("Qwen/Qwen3-8B", "calculator")
    assert (about["Sampling"], about["Samples per prompt"]) == ("temperature 0.7", "4")
    assert "UTC, took " in about["Started"]
    assert about["Page made by"] == f"strands-env report {tmp_path} --html, version {__version__}"


@pytest.mark.parametrize(
    ("before", "after", "told"), [(0.0, 1.0, "B is better: pass@1 +"), (1.0, 0.0, "A is better: ")]
)
def test_a_comparison_begins_with_its_verdict(before, after, told, tmp_path):
    a, b = (evaluated(tmp_path / name, [step_result(reward)], 20) for name, reward in (("a", before), ("b", after)))
    assert report_of(a, b)["report"]["headline"].startswith(told)


def test_a_comparison_names_flips_and_moved_outcomes(tmp_path):
    first = [step_result(1.0)] * 2 + [step_result(0.0)] * 2 + [step_result(0.0), step_result(1.0)]
    second = [step_result(0.0, reason="timeout")] * 2 + [step_result(1.0)] * 2 + [step_result(0.0), step_result(1.0)]
    a, b = (
        evaluated(tmp_path / name, results, n_samples=2, max_concurrency=1)
        for name, results in (("a", first), ("b", second))
    )
    index = report_of(a, b)
    report = index["report"]
    for reward, number in itertools.chain(*(own for task in report["tasks"] for own in task["samples"])):
        assert f"{index['episodes'][number]['reward']:g}" == reward
    found = compare(read_results(a), read_results(b))
    assert [task["state"] for task in report["tasks"]] == ["flipped to failure", "flipped to success", "same"]
    assert [task["values"]["pass@1"] for task in report["tasks"]] == [[1, 0, -1], [0, 1, 1], [0.5, 0.5, 0]]
    [row] = [row for row in report["tables"][2]["rows"] if row[0] == "timeout"]
    assert (row[1], row[3], row[5]) == ("0", "2", "+2")
    # All rewards are 0 or 1, so that the mean reward is pass@1.
    assert [row[0] for row in report["tables"][0]["rows"]] == ["pass@1", "pass@2"]
    assert list(report["metrics"]) == ["pass@1"]
    assert found.differences[0].interval.value == 0 and report["headline"].startswith("No clear difference: pass@1 ")
    assert all(len(own) == 2 for task in report["tasks"] for own in task["samples"])


def test_only_shared_tasks_are_compared_and_it_says_so(tmp_path, capsys):
    a, b, c = (evaluated(tmp_path / name, [step_result()], count) for name, count in (("a", 3), ("b", 5), ("c", 1)))
    report = report_of(a, b)["report"]
    assert len(report["tasks"]) == 3 and "2 only in B: only those in both are compared" in report["notes"][0]
    plan = json.loads((c / "results.run.json").read_text())
    (c / "results.run.json").write_text(json.dumps({**plan, "prompts": {"t0": "another"}}))
    code, error = told(capsys, "compare", a, c, "--html", "-o", tmp_path / "page.html")
    assert code == 2 and "no prompt" in error and not (tmp_path / "page.html").exists()


def test_prompts_with_other_ids_are_the_same_task(tmp_path):
    a, b = (evaluated(tmp_path / name, [step_result()], 2) for name in "ab")
    for name in ("results.run.json", "results.jsonl"):
        (b / name).write_text((b / name).read_text().replace('"t1"', '"renamed"'))
    report = report_of(a, b)["report"]
    assert [task["name"] for task in report["tasks"]] == ["t0", "t1"]
    assert [[len(own) for own in task["samples"]] for task in report["tasks"]] == [[4, 4], [4, 4]]


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_run_that_is_written_has_a_page(tmp_path, cut, capsys):
    evaluated(tmp_path, MIXED[:2])
    content = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(content[:-cut])
    index = report_of(tmp_path)
    assert len(index["episodes"]) == sum(len(task["samples"][0]) for task in index["report"]["tasks"]) >= 11
    main(["report", str(tmp_path)])
    assert f", {int(cut > 1)} not run, 0 dropped," in index["report"]["notes"][0]
    assert (", 1 not run\n" in capsys.readouterr().out) == (cut > 1)


def test_a_run_without_any_sample_has_a_page(tmp_path):
    evaluated(tmp_path, MIXED[:2])
    (tmp_path / "results.jsonl").write_bytes(b"")
    index = report_of(tmp_path)
    assert index["episodes"] == [] and index["report"]["metrics"] == {} and index["report"]["plots"] == []
    assert {task["state"] for task in index["report"]["tasks"]} == {"not scored"}


def test_metrics_without_any_value_are_left_out(tmp_path):
    report = report_of(evaluated(tmp_path, [LOST]))["report"]
    assert report["metrics"] == {}
    assert {row[1] for row in report["tables"][0]["rows"]} == {"-"}


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    evaluated(tmp_path, [step_result(1.0)])
    values = itertools.cycle(["many", None, True, [1], "</script>"])
    change_records(tmp_path, lambda _, record: record["observation"]["metrics"].update(sampled_tokens=next(values)))
    report = report_of(tmp_path)["report"]
    assert "Sampled tokens" not in {plot["title"] for plot in report["plots"]}
    assert {task["facts"][report["facts"].index("Tokens")] for task in report["tasks"]} == {None}


def test_records_of_earlier_releases_have_a_page(tmp_path):
    evaluated(tmp_path, MIXED)
    for name in ("results.jsonl", "results.failures.jsonl"):
        records = lines(tmp_path / name)
        for record in records:
            for later in ("ended_at", "environment", "is_errored", "reward_error"):
                del record[later]
        save_records(tmp_path / name, records)
    assert len(report_of(tmp_path)["episodes"]) == 12


def test_without_trajectories_conversations_are_shown(tmp_path):
    page = Page(report_page(evaluated(tmp_path, [step_result(text="hello")], 1, 1), success_threshold=1.0))
    assert page.body(0)["said"] == [["assistant", "text", "hello", ""]]


@pytest.mark.parametrize("fits", [True, False])
def test_tokens_are_in_the_page_if_it_has_room(fits, chatml_tokenizer, tmp_path, monkeypatch):
    asked(chatml_tokenizer, tmp_path, keep_trajectories=True)
    if not fits:
        monkeypatch.setattr("strands_sglang.viewer.page.MOST_TOKENS", 10)
    page = Page(report_page(tmp_path, success_threshold=1.0))
    assert all(bool(episode["tokens"]) is fits for episode in page.index["episodes"])
    assert any("conversations only" in note for note in page.index["report"]["notes"]) is not fits
    for number, episode in enumerate(page.index["episodes"]):
        assert not {"trains", "advantage", "weight"} & set(episode["columns"])
        assert all("trained" not in sequence["name"] for sequence in page.body(number)["sequences"])
    said = page.body(0)["said"] or [part for turn in page.body(0)["turns"] for part in turn["said"]]
    assert any("It is 0." in part[2] for part in said)


def played(text, reward, **info):
    """What an agent said, and what a reward function thought of it."""
    result = step_result(reward, text)
    return result if reward is None else result.model_copy(update={"reward": RewardResult(reward=reward, info=info)})


def test_each_sample_says_why_it_has_its_reward(tmp_path):
    results = [
        played("It is 5.", 0.0, verdict="wrong", extracted="5", ground_truth="4", reason="5 is not 4"),
        played("Who knows?", 0.0, verdict="no_answer", extracted=None),
        step_result(None, "7", error="a tool is broken"),
        played("4", 1.0, parts={"format": 0.5}),
    ]
    evaluated(tmp_path, results, 1, 4, max_concurrency=1)
    page = Page(report_page(tmp_path, success_threshold=1.0))
    wrong, silent, broken, other = (dict(page.body(number)["score"]) for number in range(4))
    assert {name: wrong[name] for name in ("target", "extracted", "verdict", "info: reason")} == {
        "target": str(tasks(1)[0].task_context.ground_truth),
        "extracted": "5",
        "verdict": "wrong",
        "info: reason": "5 is not 4",
    }
    assert silent["verdict"] == "no_answer" and silent["extracted"].startswith("nothing")
    assert silent["final answer"] == "Who knows?" and "final answer" not in wrong
    assert {one["target"] for one in page.index["episodes"]} == {wrong["target"]}
    assert "a tool is broken" in broken["error"] and "verdict" not in broken
    assert (other["final answer"], other["info: parts"]) == ("4", '{"format": 0.5}')


def test_a_sample_is_called_by_its_task_and_number(tmp_path, capsys):
    evaluated(tmp_path, MIXED[:2], 2, 2)
    keys = {(one["prompt_id"], one["sample_index"]): one["key"] for one in lines(tmp_path / "results.jsonl")}
    index = report_of(tmp_path)
    assert [one["id"] for one in index["episodes"]] == ["t0 #0", "t0 #1", "t1 #0", "t1 #1"]
    assert [one["key"] for one in index["episodes"]] == [keys[prompt, at] for prompt in ("t0", "t1") for at in (0, 1)]
    for name in ("t1#0", "t1 #0", keys["t1", 0]):
        assert show_main(["show", str(tmp_path), "--episode", name]) == 0
        assert "episode t1 #0:" in capsys.readouterr().out
    assert show_main(["show", str(tmp_path), "--episode", "t2#0"]) == 2
    error = capsys.readouterr().err
    assert "'t0 #0', 't0 #1', 't1 #0', 't1 #1'" in error and keys["t1", 0] not in error


def test_calls_that_were_not_kept_are_counted_from_the_record(tmp_path):
    evaluated(tmp_path, [step_result(1.0)], 1, 1)
    [record] = lines(tmp_path / "results.jsonl")
    for metrics, counts in (
        ({"model_calls": 4, "sampled_tokens": 190}, "4 model calls, 190 sampled tokens"),
        ({}, "turns and tokens"),
    ):
        record["observation"]["metrics"] = metrics
        save_records(tmp_path / "results.jsonl", [record])
        [episode] = report_of(tmp_path)["episodes"]
        assert (episode["turns"], episode["tokens"]) == (None, None)
        assert episode["unkept"] == f"{counts} (not kept: evaluate with --keep-trajectories)"


def test_an_evaluation_has_no_credit(tmp_path):
    index = report_of(evaluated(tmp_path, MIXED[:2]))
    assert index["credit"] == []
    assert {(one["advantage"], one["trained"]) for one in index["episodes"]} == {(None, None)}


def test_commands_write_the_page_and_name_it(tmp_path, capsys, monkeypatch):
    a = evaluated(tmp_path / "a", MIXED)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "--html"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main(["compare", "a", str(a), "--html", "-o", "pages/both.html"]) == 0
    assert (tmp_path / "pages" / "both.html").read_text().startswith("<!doctype html>")


def test_what_cannot_be_done_is_one_line(tmp_path, capsys):
    a = evaluated(tmp_path / "a", MIXED)
    for name, plan in (("folder", None), ("later", {"format": "strands-env evaluation 2"}), ("other", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.run.json").write_text(json.dumps(plan))
    for arguments, why in (
        ((a, "-o", "x.html"), "--output and --open need --html"),
        ((a, "--html", "--json"), "--html and --json"),
        ((tmp_path / "none", "--html"), "no results of an evaluation"),
        (
            (tmp_path / "later",),
            "this release reads the format 'strands-env evaluation 1', not 'strands-env evaluation 2'",
        ),
        ((tmp_path / "other",), "'format' is missing"),
        ((a, "--html", "-o", tmp_path / "folder"), f"--output {tmp_path / 'folder'}"),
    ):
        code, error = told(capsys, "report", *arguments)
        assert code == 2 and why in error and error.count("\n") == 1
    (a / "results.jsonl").write_bytes(b'{"key":"damaged\n' + (a / "results.jsonl").read_bytes())
    code, error = told(capsys, "report", a, "--html", "-o", tmp_path / "page.html")
    assert code == 2 and "damaged" in error and not (tmp_path / "page.html").exists()
