"""Evaluation: many samples of many tasks, kept as they finish, and metrics with their uncertainty."""

from .checkpoint import CheckpointError, DuplicateTaskError, EvalSample, Results, read_results
from .evaluator import EvaluationStoppedError, Evaluator
from .metrics import AnswerFn, MetricFn, answer_of, standard_metrics

__all__ = [
    "AnswerFn",
    "CheckpointError",
    "DuplicateTaskError",
    "EvalSample",
    "EvaluationStoppedError",
    "Evaluator",
    "MetricFn",
    "Results",
    "answer_of",
    "read_results",
    "standard_metrics",
]
