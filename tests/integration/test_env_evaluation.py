"""An evaluation from the command line on a real server, killed once: nothing is lost and nothing is generated again."""

import pytest

from strands_sglang import local
from support.killed_evaluation import (
    LOG_EVERYTHING,
    assert_nothing_lost_or_repeated,
    assert_same_metrics,
    evaluate_and_kill,
    independent_metrics,
)

TASKS, SAMPLES = 8, 2


@pytest.fixture(scope="module")
def logging_server(sglang_python, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("logging_server") / "server.log"
    model_path = local.ensure_smollm2(sglang_python)
    settings = local.ServerSettings(threads=1, extra_arguments=LOG_EVERYTHING)
    with local.start_server(sglang_python, model_path, settings=settings, log_path=log_path) as server:
        yield server.base_url, model_path, log_path


def test_an_evaluation_that_is_killed_and_resumed_has_each_sample_once(own_server, logging_server, tmp_path):
    base_url, model_path, log_path = logging_server
    killed = evaluate_and_kill(base_url, model_path, log_path, tmp_path, tasks=TASKS, samples=SAMPLES, kills=1)
    assert_nothing_lost_or_repeated(killed, tasks=TASKS, samples=SAMPLES)
    assert_same_metrics(killed.metrics, independent_metrics(killed.records, SAMPLES))
    assert any(record["reward"] == 1.0 for record in killed.records)
