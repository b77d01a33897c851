"""Evaluation: run many samples of many tasks, store each result, and compute metrics with confidence intervals."""

from .checkpoint import CheckpointError, DuplicateTaskError, EvalSample, Results, read_results
from .episodes import Executor, ExecutorError, LocalRunner, Runner, SampleRun
from .evaluator import EvaluationStoppedError, Evaluator, register_eval
from .metrics import AnswerFn, MetricFn, answer_of, standard_metrics
from .scoring import score

__all__ = [
    "AnswerFn",
    "CheckpointError",
    "DuplicateTaskError",
    "EvalSample",
    "EvaluationStoppedError",
    "Evaluator",
    "Executor",
    "ExecutorError",
    "MetricFn",
    "Results",
    "LocalRunner",
    "Runner",
    "SampleRun",
    "answer_of",
    "read_results",
    "register_eval",
    "score",
    "standard_metrics",
]
