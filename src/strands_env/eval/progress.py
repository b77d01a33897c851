"""A progress bar with rate, remaining time and running reward; nothing where nobody looks at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from .records import EvalSample


class Progress:
    """Counts samples on standard error while its `with` block runs.

    The mean reward is over the rewards seen so far, of finished samples of earlier runs too.
    """

    def __init__(self, description: str, total: int, done: Sequence[EvalSample], *, shown: bool | None = None) -> None:
        """Begin.

        Args:
            description: In front of the bar.
            total: All samples.
            done: Those that are finished already; they don't count for the rate.
            shown: Whether to show it; None for "if standard error is a terminal".
        """
        self._rewards = 0.0
        self._rewarded = 0
        self._failed = 0
        self._bar = tqdm(
            desc=description,
            total=total,
            initial=len(done),
            unit="sample",
            dynamic_ncols=True,
            file=sys.stderr,
            disable=None if shown is None else not shown,
        )
        for sample in done:
            self._count(sample)
        self._show()

    def __enter__(self) -> Progress:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the last line as it is."""
        self._bar.close()

    def add(self, sample: EvalSample) -> None:
        """Count one that ended."""
        self._count(sample)
        self._show()
        self._bar.update()

    def _count(self, sample: EvalSample) -> None:
        self._failed += sample.is_errored or not sample.is_finished
        if sample.is_finished and sample.reward is not None:
            self._rewards += sample.reward
            self._rewarded += 1

    def _show(self) -> None:
        fields = {}
        if self._rewarded:
            fields["reward"] = f"{self._rewards / self._rewarded:.3f}"
        if self._failed:
            fields["failed"] = str(self._failed)
        self._bar.set_postfix(fields, refresh=False)
