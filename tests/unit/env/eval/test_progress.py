from __future__ import annotations

import re

from strands_env.core import Action
from strands_env.eval import EvalSample
from strands_env.eval.progress import Progress
from support.evaluation import step_result


def sample(reward, *, finished=True):
    return EvalSample(prompt_id="p", action=Action(message="?"), step_result=step_result(reward), is_finished=finished)


def test_the_bar_has_rate_remaining_time_running_reward_and_failures(capsys):
    with Progress("sums", 10, [sample(1.0), sample(0.0)], shown=True) as progress:
        progress.add(sample(1.0))
        progress.add(sample(None, finished=False))
    shown = capsys.readouterr().err
    assert re.search(
        r"sums: .*3/10 .*<.*sample.*reward=0\.667|sums: .*4/10 .*<.*sample.*reward=0\.667, failed=1", shown
    )


def test_nothing_is_shown_where_nobody_looks_at_a_terminal(capsys):
    with Progress("sums", 2, []) as progress:
        progress.add(sample(1.0))
    assert capsys.readouterr().err == ""
