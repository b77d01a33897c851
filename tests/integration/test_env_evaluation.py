"""An evaluation from the command line on a real server, killed once: nothing is lost and nothing is generated again."""

import pytest

from support.killed_evaluation import (
    assert_nothing_lost_or_repeated,
    assert_same_metrics,
    evaluate_and_kill,
    independent_metrics,
)

TASKS, SAMPLES = 8, 2


@pytest.mark.timeout(900, func_only=True)
def test_an_evaluation_that_is_killed_and_resumed_has_each_sample_once(own_server, smollm_server, tmp_path):
    server = smollm_server
    killed = evaluate_and_kill(
        server.base_url, server.model_path, server.log_path, tmp_path, tasks=TASKS, samples=SAMPLES, kills=1
    )
    assert_nothing_lost_or_repeated(killed, tasks=TASKS, samples=SAMPLES)
    assert_same_metrics(killed.metrics, independent_metrics(killed.records, SAMPLES))
    assert any(record["reward"] == 1.0 for record in killed.records)
