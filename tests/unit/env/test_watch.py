"""The live view of evaluations and training runs."""

import asyncio
import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console
from rich.live import Live

from strands_env.cli import main
from strands_env.eval import CheckpointError, EvaluationStoppedError, Evaluator, read_results
from strands_env.eval.benchmarks import TaskError, load_tasks
from strands_env.eval.checkpoint import ResultsReader, read_status
from strands_env.eval.evaluator import Progress
from strands_env.eval.metrics import table_lines
from strands_env.watch import (
    EvaluationView,
    View,
    bars,
    duration,
    open_run,
    pace_lines,
    ranked,
    read_steps,
    step_table,
    watch,
)
from strands_sglang import Outage
from strands_sglang.credit import TrainingRows
from strands_sglang.shown import visible
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.environments import StubEnvironment, lines, sample, step_result, tasks

# --- reading what was added ---


LOST = step_result(None, reason="infrastructure_error")


def evaluate(folder, results, count, samples=1, **settings):
    """Run an evaluation whose episodes have these results, the last one again and again."""
    left = [*results]
    stub = StubEnvironment(lambda action: left.pop(0) if len(left) > 1 else left[0])
    asyncio.run(Evaluator(stub.factory, samples, output_path=folder, **settings).run(tasks(count)))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a finished evaluation with dropped samples, and the bytes of its results."""
    folder = tmp_path_factory.mktemp("written")
    evaluate(folder, [step_result(1.0), step_result(0.0), LOST] * 4, 4, 3)
    return folder


@pytest.fixture
def copied(written, tmp_path):
    """A copy of `written`, in which a test may change files."""
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_reader_sees_what_a_fresh_one_sees(written, tmp_path_factory, data):
    """Also between the bytes of a record, and after what a killed process left."""
    folder = tmp_path_factory.mktemp("read")
    shutil.copy(written / "results.run.json", folder)
    content = (written / "results.jsonl").read_bytes()
    reader = ResultsReader(folder)
    borders = [match.start() + more for match in re.finditer(rb"\n", content) for more in (-1, 0, 1)]
    ends = data.draw(st.lists(st.sampled_from(borders) | st.integers(0, len(content)), max_size=5))
    for end in [*sorted(ends), len(content)]:
        (folder / "results.jsonl").write_bytes(content[:end])
        assert reader.read() == read_results(folder)
    (folder / "results.jsonl").write_bytes(content[: len(content) // 3])  # written from the start again
    assert reader.read() == read_results(folder)


def test_samples_of_a_larger_run_are_seen(tmp_path):
    evaluate(tmp_path, [step_result()], 2)
    reader = ResultsReader(tmp_path)
    assert sum(map(len, reader.read()[1].values())) == 2
    evaluate(tmp_path, [step_result()], 2, 3)
    assert sum(map(len, reader.read()[1].values())) == 6


@pytest.mark.parametrize("count", [1, 3])
def test_a_folder_that_was_started_afresh_is_read_afresh(tmp_path, count):
    def run(outcomes):
        evaluate(tmp_path / "out", outcomes * 3, len(outcomes) * 3)

    run([step_result(0.0), LOST])
    reader = ResultsReader(tmp_path / "out")
    reader.read()
    before = reader.state
    shutil.rmtree(tmp_path / "out")
    run([step_result(1.0, "a longer answer"), step_result(1.0)] * count)
    assert reader.read() == read_results(tmp_path / "out") and reader.state != before


def test_a_damaged_line_is_an_error_with_its_place(copied, capsys):
    reader = ResultsReader(copied)
    reader.read()
    size = (copied / "results.jsonl").stat().st_size
    with (copied / "results.jsonl").open("ab") as file:
        file.write(b"{broken\n")
    with pytest.raises(CheckpointError, match=f"byte {size}: damaged"):
        reader.read()
    assert main(["watch", str(copied)]) == 2
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("end", [b"{broken\n", b""], ids=["damaged", "not complete"])
def test_what_replaces_a_file_that_was_not_read_to_its_end_is_read_whole(end, copied):
    file = copied / "results.jsonl"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(lines[0] + end if end else lines[0].rstrip(b"\n"))
    reader = ResultsReader(copied)
    with contextlib.suppress(CheckpointError):
        reader.read()
    file.write_bytes(b"".join(lines[1:]))
    assert reader.read() == read_results(copied)


# --- what it shows ---


def look(folder, at=None):
    """The view of a run, now or at another time."""
    return open_run(folder)(time.time() if at is None else at)


def replan(folder, **changes):
    """Change the plan of an evaluation."""
    plan = folder / "results.run.json"
    plan.write_text(json.dumps({**json.loads(plan.read_bytes()), **changes}))


def rewrite(folder, records):
    """Replace the results of an evaluation, as its writer writes them."""
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    (folder / "results.jsonl").write_text(text)


def shown_by(capsys, *command, code=0):
    """The output of a command in one line."""
    assert main(list(map(str, command))) == code
    return " ".join(capsys.readouterr().out.split())


def status_of(folder, running, *, left=40, seconds=0, outages=()):
    """Write the status of an evaluation whose samples have run for so many seconds."""
    began = {f"gsm-000{number} #0": time.time() - seconds for number in range(running)}
    file = folder / "results.status.json"
    file.write_text(json.dumps({"began": began, "left": left, "outages": list(outages)}))
    return file


def ended(times):
    return [sample(1.0, ended_at=at) for at in times]


@pytest.mark.parametrize(
    ("times", "missing", "now", "told"),
    [
        ([90], 4, 100, "last result 10 s ago"),
        ([40, 60, 80, 100], 6, 100, "3.0 samples a minute, 2 min 00 s left, last result 0 s ago"),
        ([40, 60, 80, 100], 6, 160, "1.5 samples a minute, 4 min 00 s left, last result 1 min 00 s ago"),
        ([40, 60, 80, 100], 0, 100, "last result 0 s ago"),
        ([0, 1, 2, 9000, 9030, 9060], 1, 9060, "2.0 samples a minute, 30 s left, last result 0 s ago"),
        ([40, 100], 1, 90, "1.0 samples a minute, 1 min 00 s left, last result 0 s ago"),
        ([40, 100], 1, 9100, "last result 2 h 30 min ago"),
    ],
)
def test_the_rate_is_that_of_the_last_minutes(times, missing, now, told):
    assert pace_lines(ended(times), missing, now) == [told]


def test_dropped_samples_are_no_results():
    dropped = [sample(None, finished=False, ended_at=at) for at in (98, 99, 100)]
    assert pace_lines(dropped, 4, 100) == pace_lines(ended([None, None]), 4, 100) == []
    assert pace_lines(ended([40]) + dropped, 4, 100) == ["last result 1 min 00 s ago"]


def test_the_rate_has_the_tokens_that_were_sampled_per_second():
    """Those of results since the first of the last minutes, which began before them."""
    done = ended([40, 60, 80, 100])
    for one, tokens in zip(done, (9000, 6000, 300, None), strict=True):
        one.step_result.observation.metrics["sampled_tokens"] = tokens
    told = "3.0 samples a minute, 2 min 00 s left, last result 0 s ago, 105.0 tokens/s"
    assert pace_lines(done, 6, 100) == [told]


def test_the_bar_of_the_command_has_the_same_remaining_time(written, tmp_path, monkeypatch):
    """Two slots; the time is known once both have ended, and there are two results of the last minutes."""
    folder = shutil.copytree(written, tmp_path / "run")
    (folder / "results.failures.jsonl").unlink()
    records = lines(folder / "results.jsonl")
    start, now = 1_800_000_000.0, 1_800_000_500.0
    os.utime(folder / "results.run.json", (start,) * 2)
    running, left = {"a #0": now - 20, "b #0": now - 10}, []
    with Progress("sums", 12, [], running=running, shown=True) as progress:
        for number, ended_at in enumerate((start + 100, start + 410, start + 440, start + 470)):
            records[number]["ended_at"] = ended_at
            rewrite(folder, records[: number + 1])
            status = {"began": running, "left": 11 - number, "outages": []}
            (folder / "results.status.json").write_text(json.dumps(status))
            os.utime(folder / "results.status.json", (now,) * 2)
            monkeypatch.setattr(time, "time", lambda: ended_at)  # noqa: B023
            progress.add(sample(1.0))
            monkeypatch.setattr(time, "time", lambda: now)
            shown = look(folder, now).lines[0]
            left.append((str(progress).split("<")[1].split(",")[0], re.findall("[^,]+ left|last", shown)[0].strip()))
    assert left == [("?", "last"), ("?", "last"), ("13:30", "13 min left"), ("06:00", "6 min 00 s left")]


@pytest.mark.parametrize(("lost", "first"), [(1, ["pass@1"]), (0, ["pass@1", "avg@4", "pass@2", "pass^2"])])
def test_the_view_leaves_out_the_metrics_of_some_prompts_only(lost, first, tmp_path):
    evaluate(tmp_path, [step_result(1.0)] * (8 - 4 * lost) + [LOST] * 4 * lost, 2, 4, max_concurrency=1)
    shown = look(tmp_path).lines
    table = shown[next(at for at, line in enumerate(shown) if line.startswith("metric ")) + 1 :]
    assert [line.split()[0] for line in table[: len(first)]] == first and (not lost or not table[1])


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-2, "0 s"), (59, "59 s"), (90.4, "1 min 30 s"), (599, "9 min 59 s"), (600, "10 min"), (3900, "1 h 05 min")],
)
def test_durations_are_short_and_have_seconds_below_ten_minutes(seconds, told):
    assert duration(seconds) == told


def test_an_evaluation_is_shown_with_the_numbers_of_its_report(written, capsys):
    assert main(["report", str(written)]) == 0
    report = capsys.readouterr().out.splitlines()
    assert main(["watch", str(written)]) == 1  # samples were dropped
    out = capsys.readouterr().out
    shown = [line.rstrip() for line in out.splitlines()]
    hidden = [line for line in report if line.strip() and line.rstrip() not in shown]
    assert [line for line in hidden if " 4 " in line.partition(" to ")[2]] == []  # of all 4 prompts
    assert "8/12" in out and "slowest: " in out and max(map(len, shown)) <= 80


def test_the_view_begins_with_the_score_and_the_last_failure(written, capsys):
    shown = look(written)
    assert main(["report", str(written), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert shown.headline == "pass@1 {pass@1:.3f}, {pass@1_low:.3f} to {pass@1_high:.3f}".format_map(metrics)
    _, results = read_results(written)
    failed = [one for samples in results.values() for one in samples if not one.is_finished]
    last = max(failed, key=lambda one: one.ended_at)
    assert re.fullmatch(rf"last failure \d+ s ago: {last.name}: infrastructure_error", shown.alarms[1])
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, color_system="standard", width=40).print(shown)
    colored = re.findall(r"\x1b\[([0-9;]+)m([^\x1b]*)", screen.getvalue())
    assert {text[:7] for codes, text in colored if codes == "31"} >= {"! last ", "dropped"}
    assert any(codes == "34" and set(text) <= set("━╸") for codes, text in colored)  # the bar is blue, not red
    assert not any(codes == "31" and "━" in text for codes, text in colored)


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_finished_sample_there_is_no_score(tmp_path, count, capsys):
    evaluate(tmp_path, [LOST], count)
    assert look(tmp_path).headline == ""
    assert "pass@1 nan" not in shown_by(capsys, "watch", tmp_path, code=count)


def test_a_long_error_keeps_its_end(tmp_path, capsys):
    error = "cannot connect to host " + "x " * 100 + "('127.0.0.1', 30000)"
    evaluate(tmp_path, [step_result(None, reason="infrastructure_error", error=error)], 1)
    for command, code in (("report", 0), ("watch", 1)):
        told = shown_by(capsys, command, tmp_path, code=code)
        assert "cannot connect to host" in told and " … " in told and "('127.0.0.1', 30000)" in told


def test_samples_that_run_or_wait_are_not_dropped(tmp_path, monkeypatch, capsys):
    """Of 8 samples 2 are done and 1 is dropped, 2 run and 3 wait."""
    silent = [Outage("http://one", 40.0, 6, 47.0), Outage("http://two", 30.0)]
    monkeypatch.setattr("strands_env.eval.evaluator.outages", lambda: silent)
    results = iter([step_result(1.0), step_result(0.0), LOST])

    async def run():
        both, looked = asyncio.Event(), asyncio.Event()
        running = []

        async def play(action):
            if (result := next(results, None)) is None:
                running.append(action)
                if len(running) == 2:
                    both.set()
                await looked.wait()
            return result or step_result(1.0)

        stub = StubEnvironment(play)
        evaluation = asyncio.ensure_future(
            Evaluator(stub.factory, 2, max_concurrency=2, output_path=tmp_path).run(tasks(4))
        )
        await both.wait()
        while (status := read_status(tmp_path)) is None or [*status.began] != ["t1 #1", "t2 #0"]:
            await asyncio.sleep(0.01)
        shown = look(tmp_path)
        looked.set()
        await evaluation
        return shown

    monkeypatch.setattr("strands_env.eval.evaluator.TICK", 0.01)
    shown = asyncio.run(run())
    assert "counts: 4 prompts, 2 done, 2 running, 3 waiting, 1 dropped" in shown.lines
    assert re.fullmatch(r"running longest: t1 #1 \d s, t2 #0 \d s", shown.lines[1]), shown.lines
    told = ["40 s: 6 samples wait; next dropped in 47 s", "30 s: 1 sample waits"]
    assert shown.alarms == [
        f"http://{name} has not answered for {what}" for name, what in zip(("one", "two"), told, strict=True)
    ]
    assert "left" not in shown.lines[0] and read_status(tmp_path) is None
    assert "7 done, 1 dropped" in shown_by(capsys, "report", tmp_path)


def test_a_small_terminal_shows_what_runs_the_score_and_the_outage_first(copied, monkeypatch):
    replan(copied, n_samples_per_prompt=20)
    status_of(copied, 3, outages=["http://one has not answered for 40 s: 6 samples wait; next dropped in 9 s"])
    monkeypatch.setattr("strands_sglang.terminal.width", lambda: 60)
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=True, color_system=None)
    with Live(look(copied), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
    drawn = console.file.getvalue().split("\x1b[H")[-1].splitlines()
    assert len(drawn) == 20 and all(len(re.sub(r"\x1b\S*?[a-zA-Z]", "", line)) <= 60 for line in drawn)
    assert any("3 running" in line for line in drawn)
    assert re.search(r"4 prompts x 20 samples, \d+ s so far$", drawn[0].rstrip().removesuffix("\x1b[0m"))
    assert drawn[1].startswith("so far pass@1 0.") and "next dropped in 9 s" in " ".join(" ".join(drawn[3:5]).split())
    table = next(at for at, line in enumerate(drawn) if line.startswith("metric "))
    assert drawn[table].split() == ["metric", "value", "95", "%", "interval", "prompts"]  # the last column has no room
    assert drawn[table + 1].startswith("pass@1")


@pytest.mark.parametrize("columns", [40, 60])
def test_the_steps_of_a_training_run_fit_a_narrow_terminal(columns, tmp_path, monkeypatch):
    monkeypatch.setattr("strands_sglang.terminal.width", lambda: columns)
    folder = training(tmp_path, [(n, 0.1234567 * n, 60) for n in range(1, 30)])
    lines = look(folder).lines
    assert max(map(len, lines)) <= columns and any(line.startswith("reward 3.58, ") for line in lines)


def test_the_title_has_the_time_that_a_run_takes(copied):
    results = copied / "results.jsonl"
    records = lines(results)
    (copied / "results.failures.jsonl").unlink()
    began = min(one["ended_at"] - one["seconds"] for one in records)
    status_of(copied, 3)
    os.utime(copied / "results.status.json", (began + 3900,) * 2)
    assert look(copied, began).title == "evaluation: 4 prompts x 3 samples, 1 h 05 min so far"
    rewrite(copied, [{**record, "ended_at": None} for record in records])
    assert look(copied, began).title == "evaluation: 4 prompts x 3 samples"
    results.write_text("")
    os.utime(copied / "results.run.json", (began + 60,) * 2)
    assert look(copied, began).title.endswith(", 1 h 04 min so far")
    evaluate(copied / "whole", [step_result()], 1)
    assert look(copied / "whole").title == "evaluation: 1 prompt x 1 sample, took 0 s"


def test_the_pause_before_a_resume_is_no_time_of_the_run(copied):
    """Three hours ago 4 samples ended in a process, and two minutes ago another one began."""
    now = time.time()
    records = lines(copied / "results.jsonl")
    (copied / "results.failures.jsonl").unlink()
    ends = [now - 10800] * 4 + [now - 90, now - 60, now - 30]
    rewrite(copied, [{**one, "ended_at": at} for one, at in zip(records, ends, strict=False)])
    os.utime(copied / "results.run.json", (now - 120,) * 2)
    status_of(copied, 2, left=5, seconds=20)
    shown = look(copied, now)
    assert shown.title.endswith(", 2 min 00 s so far since it was resumed")
    assert shown.lines[0].startswith("1.3 samples a minute, 3 min 45 s left, last result 30 s ago")
    status_of(copied, 4, left=5, seconds=20)  # not each slot has ended once in this process
    assert " left" not in look(copied, now).lines[0]


def test_samples_that_hang_are_an_alarm_and_there_is_no_time_left(copied):
    status_of(copied, 2, left=2, seconds=240)
    shown = look(copied)
    assert shown.alarms == ["2 samples may hang: running for 4 min 00 s or more, the slowest that ended took 0 s"]
    assert "episode_timeout" in shown.next
    status_of(copied, 2, left=2, seconds=240, outages=["http://one is silent"])
    view = EvaluationView(copied)
    assert view(time.time()).alarms == ["http://one is silent"]
    status_of(copied, 2, left=2, seconds=240)
    assert view(time.time() + 1).alarms == []  # they waited for the server
    assert " left" not in "\n".join(shown.lines)
    (copied / "results.jsonl").write_text("")
    (copied / "results.failures.jsonl").unlink()
    started = look(copied)
    assert started.alarms == [] and started.lines[0].startswith("running longest: gsm-0000 #0 4 min 00 s")
    status_of(copied, 2, left=2, seconds=1860)
    started = look(copied)
    assert started.alarms == ["2 samples may hang: running for 31 min or more, none has ended yet"]
    assert re.fullmatch(r"last result \d+ s ago", shown.lines[0])
    assert shown.lines[1] == "running longest: gsm-0000 #0 4 min 00 s, gsm-0001 #0 4 min 00 s" and not shown.has_stopped
    status_of(copied, 2, left=2, seconds=20)
    shown = look(copied)
    assert shown.alarms == [] and shown.lines[0].startswith("running longest: gsm-0000 #0 20 s")
    status_of(copied, 2, left=2, seconds=1860, outages=["http://one has not answered"])
    shown = look(copied)
    assert shown.alarms == ["http://one has not answered"]  # why they wait
    assert shown.next == "check the server, or start it again at the same address"


def test_long_episodes_do_not_hang_after_a_short_one(copied):
    """Of more slots than samples have ended, the slow ones are not known."""
    status_of(copied, 9, left=9, seconds=200)
    assert look(copied).alarms == []


def test_slots_are_counted_while_the_status_is_older_than_the_results(written, copied):
    """Of 8 slots 3 have ended since the status was written: each has another sample."""
    replan(copied, n_samples_per_prompt=20)
    _, results = read_results(written)
    names = [one.name for samples in results.values() for one in samples if one.is_finished][:3]
    began = dict.fromkeys([*names, *(f"x #{n}" for n in range(5))], 1.0) | {f"x #{n}": time.time() for n in range(5)}
    status = {"began": began, "left": 75, "outages": []}
    (copied / "results.status.json").write_text(json.dumps(status))
    shown = look(copied)
    assert "counts: 4 prompts, 8 done, 8 running, 64 waiting" in shown.lines


def test_an_evaluation_whose_errored_samples_run_again_is_not_done(tmp_path, capsys):
    evaluate(tmp_path, [step_result(None, error="boom")], 2)
    told = shown_by(capsys, "watch", tmp_path)
    assert "counts: 2 prompts, 2 done (2 errored)" in told
    assert f"done; next: run the same command again with --retry-errors, or strands-env report {tmp_path}" in told
    status_of(tmp_path, 1, left=1)
    assert not look(tmp_path).is_over


def test_an_evaluation_that_stopped_after_failures_says_why(tmp_path):
    lost = step_result(None, reason="infrastructure_error", error="no route")
    with contextlib.suppress(EvaluationStoppedError):
        evaluate(tmp_path, [step_result(1.0), lost], 6, max_concurrency=1, stop_after_failures=2)
    shown = look(tmp_path)
    told = "no process runs this evaluation now: 1 of 6 scored"
    assert (
        shown.alarms == [told, "last failure 0 s ago: t2 #0: no route"]
        and shown.next == "run the same command again to continue"
    )


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([1.0, 0.0, 1.0, None], "pass@1 0.667 (3 of 4 prompts)"),
        ([1.0, None], "pass@1 1.000 (1 of 2 prompts)"),
        ([1.0] * 9 + [0.0], "pass@1 0.900, 0.546 to 1.000"),
    ],
)
def test_the_headline_says_how_many_prompts_it_has(tmp_path, rewards, told):
    results = [LOST if reward is None else step_result(reward) for reward in rewards]
    evaluate(tmp_path, results, len(rewards), max_concurrency=1)
    assert look(tmp_path).headline == told


def test_dropped_samples_that_this_run_does_not_retry_take_no_time(written, copied):
    last = max(one.ended_at for samples in read_results(written)[1].values() for one in samples)
    told = []
    for left in (4, 8):
        status_of(copied, 1, left=left, seconds=-280)
        told.append(look(copied, last + 280).lines[0])
    assert ", 2 min 40 s left" in told[0] and ", 5 min 20 s left" in told[1]


def test_an_evaluation_that_ended_with_dropped_samples_says_how_to_go_further(written, capsys):
    shown = look(written)
    assert shown.alarms[0].startswith("ended after 0 s: 8 of 12 scored") and shown.is_over and shown.has_stopped
    assert shown.next == "run the same command again to continue"
    assert shown.title.endswith(", took 0 s") and shown.headline.startswith("pass@1")
    assert "0 " not in next(line for line in shown.lines if line.startswith("counts: "))


@pytest.mark.parametrize("lines", [["dropped: 2 x a", "  long cause"], ["ends: 2 x a", "  long"]])
def test_all_lines_of_a_failure_are_red(lines):
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, color_system="standard").print(View("run", 1, 12, lines))
    assert [line in re.findall(r"\x1b\[31m([^\x1b]*)", screen.getvalue()) for line in lines] == [lines[0][0] == "d"] * 2


def test_an_alarm_is_shown_whole(monkeypatch):
    monkeypatch.setattr("strands_sglang.terminal.width", lambda: 60)
    told = f"http://{'a-long-name.' * 8}org:30000 has not answered for 40 s, retrying (attempt 7 of 61)"
    console = Console(file=io.StringIO(), width=60, height=20)
    console.print(View("run", 1, 12, [], alarms=[told], next="look"))
    shown = console.file.getvalue().splitlines()
    words = "".join("".join(shown).replace("! ", "").split())
    assert words.endswith(f"{''.join(told.split())}next:look") and max(map(len, shown)) <= 60


def test_an_evaluation_that_was_killed_is_not_said_to_run(copied):
    status = status_of(copied, 3)
    assert look(copied).alarms == []
    os.utime(status, (time.time() - 60,) * 2)
    shown = look(copied)
    assert shown.alarms[0].startswith("ended after") and shown.is_over and "left" not in shown.lines[0]
    results = copied / "results.jsonl"
    results.write_bytes(b"".join(results.read_bytes().splitlines(keepends=True)[:5]))
    shown = look(copied)
    assert shown.alarms[0].startswith("no process runs this evaluation now: 5 of 12 scored") and shown.has_stopped
    assert not shown.is_over  # it may have been started again just now
    assert look(copied, time.time() + 90).is_over
    assert "counts: 4 prompts, 5 done, 3 not run, 4 dropped" in shown.lines


def test_nothing_is_estimated_before_each_slot_has_ended_once(written, tmp_path):
    for running, is_told in ((4, True), (40, False)):
        folder = shutil.copytree(written, tmp_path / str(running))
        replan(folder, n_samples_per_prompt=20)
        os.utime(folder / "results.run.json", ((written / "results.run.json").stat().st_mtime,) * 2)
        status_of(folder, running)
        assert (" left" in look(folder).lines[0]) == is_told


def test_a_table_leaves_out_the_columns_without_room_or_values(monkeypatch):
    rows = [
        ["metric", "value", "95 % interval", "prompts", "none"],
        ["majority@8", "0.667", "0.241 to 1.000", "6", "-"],
    ]
    assert table_lines(rows)[1] == "majority@8  0.667  0.241 to 1.000        6"
    monkeypatch.setattr("strands_sglang.terminal.width", lambda: 40)
    assert table_lines(rows)[1] == "majority@8  0.667  0.241 to 1.000"


@pytest.mark.parametrize("text", ["\x1b]0;title\x07\x1b[2J\x9b2J\u202e", "half \ud83d"])
def test_no_text_of_a_model_reaches_the_terminal_as_it_is(tmp_path, capsys, text):
    broken = step_result(None, error=f"{text} is not a number")
    todo = tasks(1)
    todo[0].task_context.id = text
    for name, result in (("a", broken), ("b", step_result(1.0))):
        config = {name: f"{text}{name}"}
        stub = StubEnvironment(lambda action, result=result: result)
        asyncio.run(Evaluator(stub.factory, output_path=tmp_path / name, config=config).run(todo))
    (tmp_path / "steps").mkdir()
    (tmp_path / "metrics.csv").write_bytes(f"step,{text},reward\n1,2,3\n".encode("utf-8", "surrogatepass"))
    for command in (
        ["report", "a"],
        ["watch", "a"],
        ["compare", "a", "b"],
        ["watch", ""],
        ["report", f"no\x1b[2J{text}"],
    ):
        code = 2 * (command[1][:2] == "no")
        assert main([command[0], *(str(tmp_path / name) for name in command[1:])]) == code
    output = "".join(capsys.readouterr())
    assert visible(text)[:9] in output and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud83d]", output)


def test_a_terminal_may_lack_characters(tmp_path, monkeypatch):
    (tmp_path / "metrics.csv").write_text("step,reward\n1,2\n2,3\n")
    evaluate(tmp_path / "out", [step_result(None, error="Übung € 数")], 1)
    for encoding in ("ascii", "latin-1"):
        for command in (["watch", tmp_path], ["watch", tmp_path / "out"], ["report", tmp_path / "out"]):
            screen = io.TextIOWrapper(io.BytesIO(), encoding)
            monkeypatch.setattr(sys, "stdout", screen)
            assert main([str(part) for part in command]) == 0
            shown = screen.buffer.getvalue()
            assert rb"\u25" not in shown and (rb"\u20ac" in shown or b"\n#" in shown or b" #\n" in shown)


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ("step,reward\n1," + "9" * 200_000, 2),
        ("step,reward,seconds\n1,inf,-5\n2,nan,1e308\n3,1,1e308\n4,2,inf", 0),
        ("step,reward\n1,1e308\n2,-1e308", 0),
    ],
)
def test_no_table_of_steps_is_an_exception(tmp_path, capsys, table, code):
    (tmp_path / "metrics.csv").write_text(f"{table}\n")
    (tmp_path / "settings.json").write_text("[" * 100_000)
    assert main(["watch", str(tmp_path)]) == code
    assert len(capsys.readouterr().err.splitlines()) == (code != 0)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        {"n_samples_per_prompt": "3"},
        {"n_samples_per_prompt": 0},
        {"prompts": ["a"]},
        {"prompts": {"a": 1}},
        {"config": []},
        {"benchmark": 1},
    ],
)
def test_a_damaged_plan_is_one_line(copied, capsys, change):
    replan(copied, **change)
    for command in ("report", "watch"):
        assert main([command, str(copied)]) == 2
        assert re.fullmatch(r"strands-env: .*results\.run\.json: damaged: .*\n", capsys.readouterr().err)


def test_deep_nesting_is_one_line(copied, capsys):
    (copied / "results.jsonl").write_text('{"key":"x","a":' + DEEP + "]" * len(DEEP) + "}\n")
    assert main(["report", str(copied)]) == 2
    (copied / "results.run.json").write_text(DEEP)
    assert main(["report", str(copied)]) == main(["watch", str(copied)]) == 2
    assert capsys.readouterr().err.count("results.run.json: damaged: ") == 2
    (copied / "c.json").write_text(DEEP)
    assert main(["eval", "--config", str(copied / "c.json")]) == 2
    for name in ("c.json", "c.jsonl"):
        (copied / name).write_text(f"{DEEP}\n")
        with pytest.raises(TaskError, match="not JSON"):
            load_tasks(copied / name)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"), [("", "neither results of an evaluation nor metrics.csv"), ("no", "/no does not exist\n")]
)
def test_a_folder_with_nothing_to_watch_is_an_error(tmp_path, capsys, name, told):
    assert main(["watch", str(tmp_path / name)]) == 2
    assert told in capsys.readouterr().err


def test_a_terminal_that_cannot_move_its_cursor_gets_the_text_once(written, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    assert watch(written).has_stopped
    assert "ended after" in (out := capsys.readouterr().out) and "\x1b" not in out


def test_an_evaluation_without_prompts_has_no_counts(tmp_path):
    evaluate(tmp_path, [step_result()], 0)
    view = look(tmp_path)
    assert view.title.startswith("evaluation: 0 prompts x 1 sample") and not any(
        "counts" in line for line in view.lines
    )


def test_an_evaluation_that_has_only_begun_is_shown(written, tmp_path):
    shutil.copy(written / "results.run.json", tmp_path)
    view = look(tmp_path)
    assert (view.done, view.total, view.is_over) == (0, 12, False)
    assert view.lines[0] == "counts: 4 prompts, 12 not run"


def training(folder, rows, *, total=6, torn=""):
    (folder / "steps").mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({"steps": total}))
    header = "step,version,reward,kl,seconds,trained_tokens,a_long_name_of_a_metric,another_long_name,more\n"
    text = "".join(f"{n},{n - 1},{reward},0.25,{seconds},600,1,2,3\n" for n, reward, seconds in rows)
    (folder / "metrics.csv").write_text(header + text + torn)
    return folder


def test_a_training_run_is_shown_by_step(tmp_path):
    folder = training(tmp_path, [(1, 0.25, 60), (2, 0.5, 90), (3, "nan", 30)], torn="4,3,0.")
    episode = {"group": "g", "reward": None, "turn_rewards": {}, "outcome": "timeout"}
    rows = TrainingRows([], {"e1": "aborted", "e2": "aborted"}, [], {}, {}, episodes={"e1": episode})
    (folder / "steps" / "step-000003").mkdir()
    rows.save(folder / "steps" / "step-000003" / "rows.safetensors")
    view = look(folder, os.path.getmtime(folder / "metrics.csv") + 5)
    text = "\n".join(view.lines)
    assert (view.done, view.total, view.is_over) == (3, 6, False) and view.title.endswith(": training for 3 min 00 s")
    assert "1 min 00 s a step, 2 min 55 s left, last step 5 s ago, 10.0 trained tokens/s" in text
    assert re.search(r"step +reward +seconds +kl +version +trained_tokens +a_long_name_of_a_metric\n", text)
    assert re.search(r"3 +nan +30 +0\.25 +2 +600", text) and "reward nan, 0.25 to 0.5 so far\n █ \n▁█ \n" in text
    assert view.headline == "reward nan, best 0.5 at step 2"  # the same number as above the plot
    assert view.alarms == ["reward: nan since step 3"] and "\nof 9 columns\n" in text
    assert "left out: 2 x aborted" in text and "step-000003 ends: 1 timeout" in text
    assert max(map(len, view.lines)) <= 80 and view.next == f"strands-sglang doctor {tmp_path}"


@pytest.mark.parametrize(("column", "is_told"), [("gap_stale_max", True), ("kl", False)])
def test_columns_that_other_trainers_do_not_have_are_explained(column, is_told, tmp_path):
    (tmp_path / "metrics.csv").write_text(f"step,reward,{column}\n1,0.5,0.25\n2,0.6,0.5\n")
    lines = look(tmp_path).lines
    told = "gap: the trainer's logprobs minus the sampler's; stale: of older weights' tokens"
    assert lines[lines.index("of 3 columns") + 1 :] == [told] * is_told


def test_a_trainer_that_is_dead_is_an_alarm(tmp_path, capsys):
    tmp_path = tmp_path / ("a-long-name-" * 9)  # its path is wider than the terminal
    tmp_path.mkdir()
    folder = training(tmp_path, [(n, 0.5, 120) for n in range(1, 4)])
    at = os.path.getmtime(folder / "metrics.csv")
    view = look(folder, at + 19 * 60)
    assert view.alarms == ["no step for 19 min, 2 min 00 s a step"] and view.has_stopped and not view.is_over
    assert view.next == "look at the output of the trainer"
    view = look(folder, at + 5 * 60)
    assert view.alarms == [] and view.lines[0].startswith(
        "2 min 00 s a step, 4 min 00 s left, last step 5 min 00 s ago"
    )
    assert open_run(training(folder, [(1, 1, 1)], total=1))(at + 5000).alarms == []  # it is over
    training(folder, [(n, 0.5, 120) for n in range(1, 4)])
    os.utime(folder / "metrics.csv", (at - 1140,) * 2)
    (folder / "settings.json").unlink()
    (folder / "trainer.log").write_text("killed")
    out = shown_by(capsys, "watch", folder, code=1)
    assert "no step for 19 min" in out and f"next: tail -n 50 {folder}/trainer.log" in out


def test_a_dead_trainer_without_seconds_is_an_alarm(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,reward\n1,0.5\n2,0.5\n")
    at = os.path.getmtime(tmp_path / "metrics.csv")
    assert look(tmp_path, at + 600).alarms == []
    view = look(tmp_path, at + 2400)
    assert view.alarms == ["no step for 40 min"] and view.has_stopped


@pytest.mark.parametrize(
    ("numbers", "total", "done"),
    [
        ([1, 2, 3, 4, 5, 3, 4, 5, 6], 9, 6),
        ([1, 2, 3, 4, 5, 3], 9, 3),  # the others of the first process are trained again
        ([0, 1, 2], 3, 3),
        ([5, 10, 15], 20, 15),
        ([*range(1, 41)], 30, 30),
    ],
)
def test_a_step_counts_once(tmp_path, numbers, total, done):
    folder = training(tmp_path, [(n, 0.5 + at, 60) for at, n in enumerate(numbers)], total=total)
    view = look(folder)
    assert (view.done, view.total, view.is_over) == (done, total, done == total)
    _, steps = read_steps(folder / "metrics.csv")
    assert len({step["step"] for step in steps}) == len(steps) and steps[-1]["reward"] == len(numbers) - 0.5


def test_the_last_row_of_a_repeated_step_counts(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,reward\n1,0.1\n2,0.2\n3,0.3\n2,0.4\n")
    assert read_steps(tmp_path / "metrics.csv")[1] == [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.4}]


def test_a_training_run_that_is_evaluated_is_not_done(tmp_path):
    folder = training(tmp_path, [(1, 1, 1)], total=1)
    (folder / "evaluation").mkdir()
    status_of(folder, 1).rename(folder / "evaluation" / "after.status.json")
    view = look(folder, time.time() + 5000)
    assert not view.is_over and view.alarms == []
    assert view.lines[0] == f"evaluating: {folder}/evaluation/after.jsonl"
    os.utime(folder / "evaluation" / "after.status.json", (1, 1))
    assert look(folder).is_over


def test_other_names_of_columns_are_known(tmp_path):
    names = ["step", "lr", "actor/kl", "train/reward_std", "train/reward_mean", "policy_loss", "actor/grad_norm"]
    rows = [[n, n * 1e-6, 0.01, 0.3, n / 20, 0.2, 1.0] for n in range(1, 13)]
    rows += [[n, n * 1e-6, 9999, 0.3, n / 20, "nan" if n == 14 else 0.2, 500] for n in range(13, 27)]
    text = "".join(f"{','.join(map(str, row))}\n" for row in [names, *rows])
    (tmp_path / "metrics.csv").write_text(text)
    view = look(tmp_path)
    assert view.headline == "train/reward_mean 1.3, best 1.3 at step 26"
    assert view.alarms == [
        "actor/kl has blown up: 9999, usually 0.01",
        "actor/grad_norm has blown up: 500, usually 1",
    ]
    assert "policy_loss was nan, last in step 14" in view.lines
    assert ranked(names, read_steps(tmp_path / "metrics.csv")[1], [])[:3] == ["step", "train/reward_mean", "actor/kl"]


def test_a_run_that_diverges_is_seen(tmp_path):
    names = [f"constant_{n}" for n in range(9)] + ["loss", "clip_fraction", "gap_mean", "kl", "reward", "step"]
    names.insert(0, "trained_rows")
    rows = enumerate((1.0, 3.0, 2.0), 1)
    steps = [{name: 128.0 for name in names} | {"loss": x, "reward": x / 10, "step": at} for at, x in rows]
    steps[-1]["kl"] = math.nan
    assert ranked(names, steps, ["kl"])[:6] == ["step", "reward", "kl", "loss", "clip_fraction", "gap_mean"]
    text = "".join(f"{','.join(str(step[name]) for name in names)}\n" for step in steps)
    (tmp_path / "metrics.csv").write_text(f"{','.join(names)}\n{text}")
    view = look(tmp_path)
    assert view.headline == "reward 0.2, best 0.3 at step 2" and "of 16 columns" in view.lines
    assert view.alarms == ["kl: nan since step 3"] and view.lines[2:5] == [
        "reward 0.2, 0.1 to 0.3 so far",
        " █▁",
        "▁██",
    ]


@pytest.mark.parametrize(
    ("columns", "alarms"),
    [
        (
            {"reward": [0.1 * n for n in range(9)] + [0.0] * 3},
            ["the reward has fallen: 0.000 in the last three steps, 0.700 in the best three"],
        ),
        ({"reward": [0.5, 0.3, 0.4] * 5, "kl": [0.01, 0.03] * 6}, []),
        ({"reward": [-1.0, -0.5, -2.0] * 5}, []),
        ({"reward": [0.0] * 8}, ["the reward is 0.000 in all 8 steps: nothing is learned"]),
        ({"reward": [0.0] * 7}, []),
        ({"reward": [0.7] * 4 + [0.0] * 3 + [0.6] * 3}, []),  # it is back
        ({"kl": [0.02, 0.03] * 6 + [5, 1966]}, ["kl has blown up: 1966, usually 0.02514"]),
        ({"kl": [3e-11] * 12 + [5e-9] * 2}, []),
        ({"grad_norm": [0.0] * 12 + [1.2] * 4}, []),  # the first rewards
        ({"kl": [1e-4 * 1.3**n for n in range(30)]}, []),  # it grows slowly
        ({"loss": [0.5, "nan", 0.4, "nan"]}, ["loss: nan since step 4"]),
        ({"grad_norm": [0.5] * 12 + [13122]}, []),  # once happens
        ({"loss": ["nan"] * 4, "kl": ["nan"] * 4}, ["loss, kl: nan since step 1"]),
        ({"eval": (["nan"] * 4 + [0.5]) * 3 + ["nan"] * 4}, []),  # every fifth step
        ({"eval": (["nan"] * 4 + [0.5]) * 3 + ["nan"] * 5}, ["eval: nan since step 16"]),
        ({"model": ["a", "b", "c"]}, []),
    ],
)
def test_what_diverges_is_an_alarm(tmp_path, columns, alarms):
    rows = zip(*columns.values(), strict=False)
    text = "".join(f"{number},{','.join(map(str, row))}\n" for number, row in enumerate(rows, 1))
    (tmp_path / "metrics.csv").write_text(f"step,{','.join(columns)}\n{text}")
    assert look(tmp_path).alarms == alarms


def test_a_trainer_that_dies_before_its_first_step_is_an_alarm(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,reward\n")
    at = os.path.getmtime(tmp_path / "metrics.csv")
    assert look(tmp_path, at + 600).alarms == []
    assert look(tmp_path, at + 7200).alarms == ["no step yet for 2 h 00 min"]
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "steps").mkdir()
    at = os.path.getmtime(tmp_path)
    assert look(tmp_path, at + 600).lines[0] == "no step yet for 10 min"
    (tmp_path / "settings.json").write_text("{}")
    os.utime(tmp_path / "settings.json", (at - 7200,) * 2)
    view = look(tmp_path, at)
    assert view.alarms == ["no step yet for 2 h 00 min"] and view.has_stopped


def test_one_step_is_not_drawn(tmp_path):
    view = look(training(tmp_path, [(1, 0.4375, 60)]))
    assert view.headline == "reward 0.438" and not any("so far" in line or "▁" in line for line in view.lines)


def test_cells_without_a_number_are_empty(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,eval\n1,\n2,0.5\n3,nan\n")
    assert step_table(*read_steps(tmp_path / "metrics.csv")) == [
        *("step  eval", "1        -", "2      0.5", "3      nan"),
        "of 2 columns",
    ]


def test_a_long_name_of_a_column_is_cut():
    for length, shown in ((30, "a" * 30), (31, "a" * 29 + "…")):
        assert step_table(["a" * length], [])[0] == shown


def test_the_steps_and_plots_are_as_many_as_fit_the_terminal(tmp_path, monkeypatch):
    folder = training(tmp_path, [(n, n, n) for n in range(1, 30)], total=40)
    shown = []
    for columns, rows in ((40, 15), (60, 20), (80, 24), (80, 40)):
        size = os.terminal_size((columns, rows))
        monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, size=size, **fallback: size)
        monkeypatch.setattr("strands_sglang.terminal.width", lambda columns=columns: columns)
        text = look(folder).lines
        console = Console(file=io.StringIO(), width=columns, height=rows)
        console.print(look(folder))
        assert len(console.file.getvalue().splitlines()) < rows
        shown.append(
            (sum(" so far" in line for line in text), sum(re.match(r"\d+  ", line) is not None for line in text))
        )
    assert shown == [(1, 1), (2, 3), (3, 5), (6, 12)]


def test_all_steps_are_drawn_on_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("strands_sglang.terminal.width", lambda: 60)
    lines = look(training(tmp_path, [(n, n, n) for n in range(601)], total=700)).lines
    at = lines.index("reward 600, 0 to 600 so far")
    assert [len(line) for line in lines[at + 1 : at + 3]] == [60, 60]
    assert lines[at + 1].strip()[-1] == "█" and lines[at + 2].startswith("▁")


@pytest.mark.parametrize(("steps", "told"), [(2, "done; next: "), (3, "")])
def test_a_run_that_ended_well_says_done_and_what_to_type_next(tmp_path, steps, told, capsys):
    """In the last lines, so that they are on any screen."""
    folder = tmp_path / "a run"
    folder.mkdir()
    training(folder, [(1, 1, 1), (2, 2, 1)], total=steps)
    out = shown_by(capsys, "watch", folder)
    assert ("done" in out) == bool(told)
    assert not told or out.endswith(f"{told}strands-env track '{folder}' --to tensorboard")


def test_an_evaluation_that_ended_well_says_done_and_what_to_type_next(tmp_path, capsys):
    evaluate(tmp_path, [step_result()], 2)
    out = shown_by(capsys, "watch", tmp_path)
    assert out.endswith(f"done; next: strands-env report {tmp_path} --html --open")


def test_what_is_wrong_is_followed_by_what_to_type_next(written, tmp_path, capsys):
    folder = training(tmp_path, [(n, 0.0, 120) for n in range(1, 9)], total=20)
    for run, command in (
        (written, "run the same command again to continue"),
        (folder, f"strands-env track {folder} --to tensorboard"),
    ):
        main(["watch", str(run)])
        alarm, _, after = " ".join(capsys.readouterr().out.split()).partition(" next: ")
        assert " ! " in alarm and after.startswith(command) and "done; " not in after


def test_a_finished_or_strange_training_run_is_shown(tmp_path):
    assert look(training(tmp_path, [(1, 1, 1)], total=1)).is_over
    (tmp_path / "settings.json").write_text("[")
    (tmp_path / "metrics.csv").write_text("")
    (tmp_path / "steps" / "step-000001").mkdir()
    (tmp_path / "steps" / "step-000001" / "rows.safetensors").write_bytes(b"torn")
    view = look(tmp_path)
    assert (view.done, view.total) == (0, None) and any(line.startswith("step-000001:") for line in view.lines)


@given(st.text(alphabet="0123456789.,\n nan-", max_size=200))
def test_any_text_is_read_as_steps(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.csv")
        path.write_text(text)
        names, steps = read_steps(path)
    assert all(set(step) <= set(names) for step in steps)
    assert not (names and steps) or all(len(line) <= 80 for line in step_table(names, steps))


def test_bars_show_values_and_gaps():
    assert bars([0.0, math.nan, 1.0]) == ["  █", "▁ █"] and bars([2.0, 2.0]) == ["  ", "▁▁"]
    assert bars([1e308, -1e308]) == ["█ ", "█▁"] and bars([math.nan]) == [" ", " "]


# --- in a terminal ---


def pane(socket):
    return subprocess.run(["tmux", "-L", socket, "capture-pane", "-p"], capture_output=True, text=True).stdout


@pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed")
@pytest.mark.parametrize("keys", ["q", "C-c"])
def test_keys_stop_and_are_not_shown(written, tmp_path, keys):
    folder = shutil.copytree(written, tmp_path / "out")
    status_of(folder, 2, left=2, seconds=240)
    os.utime(folder / "results.status.json", (time.time() + 3600,) * 2)
    socket = f"{keys}-{os.getpid()}"
    program = f"{sys.executable} -m strands_env.cli watch"
    (tmp_path / "empty").mkdir()
    empty, there = f"{program} {tmp_path}/empty", f"{program} {folder}; echo exit code $?"
    missing = f"{program} /no; echo exit code $?"
    command = f"unset COLUMNS LINES; {empty}; {there}; stty -a | grep -c ' echo '; {missing}; read wait"
    subprocess.run(["tmux", "-L", socket, "new-session", "-d", "-x", "60", "-y", "30", command], check=True)

    def press(*keys):
        subprocess.run(["tmux", "-L", socket, "send-keys", *keys], check=True)

    try:
        until(lambda: "yet: waiting" in " ".join(pane(socket).split()), lambda: pane(socket))
        press(keys)
        until(lambda: "gsm-0000" in pane(socket), lambda: pane(socket))
        press("x", "y", "z", "w")
        time.sleep(0.3)
        shown = pane(socket)
        press(keys)
        until(lambda: "exit code 2" in pane(socket), lambda: pane(socket))
        after = pane(socket)
    finally:
        subprocess.run(["tmux", "-L", socket, "kill-server"], capture_output=True)
    assert "xyzw" not in shown and shown.rstrip().splitlines()[-1] == "q or Ctrl-C to stop"
    assert "2 samples may hang" in after and "strands-env: /no does not exist\nexit code 2" in after
    assert after.split("exit code 0")[1].split()[0] == "1"  # the echo is on again


@pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed")
def test_plots_are_ascii_where_a_terminal_has_nothing_else(tmp_path):
    folder, socket = training(tmp_path, [(1, 0.1, 60), (2, 0.4, 60)]), f"ascii-{os.getpid()}"
    command = f"unset COLUMNS LINES; PYTHONIOENCODING=ascii {sys.executable} -m strands_env.cli watch {folder}"
    subprocess.run(["tmux", "-L", socket, "new-session", "-d", "-x", "60", "-y", "30", command], check=True)
    try:
        until(lambda: "to stop" in pane(socket), lambda: pane(socket))
        shown = pane(socket)
    finally:
        subprocess.run(["tmux", "-L", socket, "kill-server"], capture_output=True)
    assert "reward 0.4, 0.1 to 0.4 so far\n #\n.#\n" in shown and shown.isascii() and "\\u" not in shown


def until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


@pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed")
def test_a_run_is_watched_in_tmux_while_it_is_killed_and_resumed(chatml_tokenizer, tmp_path, capsys):
    def answer(request):
        number = int(re.findall(r"What is (\d+)", request.text)[-1])
        return ScriptedAnswer(rf"\boxed{{{2 * number if number % 3 else 7}}}", latency_s=0.05)

    chatml_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"id": f"t{n}", "question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(12)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, socket = tmp_path / "out", f"watch-{os.getpid()}"
    results, program = out / "results.jsonl", [sys.executable, "-m", "strands_env.cli"]
    out.mkdir()
    watching = f"{sys.executable} -m strands_env.cli watch {out}; echo exit code $?; read wait"

    def finished():
        return results.read_bytes().count(b"\n") if results.exists() else 0

    def has(text):
        return lambda: text in pane(socket)

    with ScriptedSGLang(chatml_tokenizer, answer).serve() as base_url:
        command = [
            *(*program, "eval", "--dataset", tmp_path / "tasks.jsonl", "--env", "calculator", "--base-url", base_url),
            *("--tokenizer", tmp_path / "tokenizer", "--n-samples", "2", "--concurrency", "1", "--output", out),
        ]
        subprocess.run(["tmux", "-L", socket, "new-session", "-d", "-x", "80", "-y", "24", watching], check=True)
        try:
            until(has("nothing"), lambda: pane(socket))
            with subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL) as process:
                until(lambda: finished() >= 5 or process.poll() is not None, lambda: "no samples")
                os.kill(process.pid, signal.SIGKILL)
            with results.open("ab") as file:
                file.write(b'{"key":"torn')
            before = {path.name: path.read_bytes() for path in out.iterdir()}
            assert 5 <= finished() < 24
            until(has(f"{finished()}/24"), lambda: pane(socket))
            assert main(["report", str(out)]) == 0
            value = re.search(r"pass@1 .*", capsys.readouterr().out)[0].split()
            until(lambda: value in map(str.split, pane(socket).splitlines()), lambda: f"{value}\n{pane(socket)}")
            assert {path.name: path.read_bytes() for path in out.iterdir()} == before
            assert main(list(map(str, command[len(program) :]))) == 0
            until(has("exit code 0"), lambda: pane(socket))
            shown = pane(socket)
        finally:
            subprocess.run(["tmux", "-L", socket, "kill-server"], capture_output=True)
    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    report = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in report if line and line not in shown] == [] and "24/24" in shown
