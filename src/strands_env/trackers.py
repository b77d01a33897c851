"""Trackers of experiments: metrics by step, to TensorBoard files, Weights & Biases, MLflow or Trackio.

`open_tracker` makes the tracker of a run. A tracker of your own is any object with `log` and `close`.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from .core.identity import describe

MLFLOW_TEXT = 500
"""Most characters of a parameter in MLflow's oldest supported servers."""


class Tracker(Protocol):
    """A run to which metrics are logged. Use it as a context, or call `close`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of a step.

        Args:
            metrics: Values by name. Values that are not finite numbers are left out.
            step: The step, such as a training step or a weight version.
        """

    def close(self) -> None:
        """Write what is pending, and end the run."""


class _Base:
    """What the adapters share."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of a step; see `Tracker`."""
        values = {metric_name(name): float(value) for name, value in metrics.items() if _is_finite(value)}
        if values:
            self._log(values, step)

    def _log(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End the run; see `Tracker`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardTracker(_Base):
    """Writes event files for TensorBoard; needs the package `tensorboardX`."""

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> None:
        """Open a new file.

        Args:
            folder: Folder of the event files.
            config: Configuration of the run, shown as text.

        Raises:
            ImportError: tensorboardX is not installed.
        """
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(logdir=str(folder))
        rows = [f"| {name} | {str(value)[:MLFLOW_TEXT]} |" for name, value in (config or {}).items()]
        if rows:
            self._writer.add_text("config", "\n".join(["| name | value |", "|---|---|", *rows]))

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is pending."""
        self._writer.close()


class WandbTracker(_Base):
    """Logs to Weights & Biases; needs the package `wandb`, whose environment variables apply (`WANDB_MODE=offline`)."""

    def __init__(self, project: str, run: str, config: Mapping[str, Any] | None = None) -> None:
        """Start a run.

        Args:
            project: Name of the project.
            run: Name of the run.
            config: Configuration of the run.

        Raises:
            ImportError: wandb is not installed.
        """
        import wandb

        self._run = wandb.init(project=project, name=run, config=dict(config or {}), reinit="create_new")

    def _log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class MlflowTracker(_Base):
    """Logs to MLflow; needs the package `mlflow` or `mlflow-skinny`. `MLFLOW_TRACKING_URI` names the server."""

    def __init__(self, project: str, run: str, config: Mapping[str, Any] | None = None) -> None:
        """Start a run.

        Args:
            project: Name of the experiment.
            run: Name of the run.
            config: Configuration of the run, as parameters.

        Raises:
            ImportError: mlflow is not installed.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if known is None else known.experiment_id
        self._id = self._client.create_run(experiment, run_name=run).info.run_id
        parameters = [Param(metric_name(name), str(value)[:MLFLOW_TEXT]) for name, value in (config or {}).items()]
        for start in range(0, len(parameters), 100):  # the most of one request
            self._client.log_batch(self._id, params=parameters[start : start + 100])

    def _log(self, values: dict[str, float], step: int) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


class TrackioTracker(_Base):
    """Logs to Trackio; needs the package `trackio`."""

    def __init__(self, project: str, run: str, config: Mapping[str, Any] | None = None) -> None:
        """Start a run.

        Args:
            project: Name of the project.
            run: Name of the run.
            config: Configuration of the run.

        Raises:
            ImportError: trackio is not installed.
        """
        import trackio

        self._run = trackio.init(project=project, name=run, config=dict(config or {}))

    def _log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


TRACKERS = {
    "tensorboard": "-e '.[tensorboard]'",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""What pip installs for each tracker, by name."""


def open_tracker(
    name: str,
    *,
    project: str = "strands-env",
    run: str = "run",
    folder: str | os.PathLike[str] = "tensorboard",
    config: Mapping[str, Any] | None = None,
) -> TensorBoardTracker | WandbTracker | MlflowTracker | TrackioTracker:
    """Start a run of a tracker.

    Args:
        name: `tensorboard`, `wandb`, `mlflow` or `trackio`.
        project: Name of the project, or of MLflow's experiment.
        run: Name of the run.
        folder: Folder of TensorBoard's event files; the run has its own folder there.
        config: Configuration of the run.

    Raises:
        ImportError: The tracker's package is not installed.
        ValueError: There is no such tracker.

    Examples:
        ```python
        with open_tracker("wandb", project="grpo", run="first") as tracker:
            tracker.log({"reward": 0.5}, step=1)
        ```
    """
    if name not in TRACKERS:
        raise ValueError(f"there is no tracker {name!r}; choose one of {', '.join(TRACKERS)}")
    config = describe(dict(config or {}))  # without the credentials of addresses
    try:
        if name == "tensorboard":
            return TensorBoardTracker(Path(folder) / run, config)
        adapter: Any = {"wandb": WandbTracker, "mlflow": MlflowTracker, "trackio": TrackioTracker}[name]
        tracker: WandbTracker | MlflowTracker | TrackioTracker = adapter(project, run, config)
        return tracker
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install {TRACKERS[name]}") from error


def metric_name(name: str) -> str:
    """A name that all trackers accept: `pass@2` is `pass_at_2`, and `pass^2` is `pass_hat_2`."""
    return re.sub(r"[^\w\-./]", "_", name.replace("@", "_at_").replace("^", "_hat_"))


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
