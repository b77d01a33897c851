"""Evaluation: run many samples of many tasks, store each result, and compute metrics with confidence intervals."""

from .checkpoint import CheckpointError, DuplicateTaskError, EvalSample, Results, read_results
from .episodes import Episode, Episodes, Executor, ExecutorError, Runner
from .evaluator import EvaluationStoppedError, Evaluator, register_eval
from .metrics import AnswerFn, MetricFn, answer_of, standard_metrics
from .scoring import score

__all__ = [
    "AnswerFn",
    "CheckpointError",
    "DuplicateTaskError",
    "Episode",
    "Episodes",
    "EvalSample",
    "EvaluationStoppedError",
    "Evaluator",
    "Executor",
    "ExecutorError",
    "MetricFn",
    "Results",
    "Runner",
    "answer_of",
    "read_results",
    "register_eval",
    "score",
    "standard_metrics",
]
