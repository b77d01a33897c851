from __future__ import annotations

from email.utils import formatdate
from time import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.client.retries import MAX_DELAY_S, RetryPolicy, retry_after_seconds


@given(st.floats(0, 100), st.integers(0, 10**6), st.none() | st.floats(0, 1e6))
def test_a_delay_is_never_longer_than_eight_seconds(retry_delay, retries, retry_after):
    delay = RetryPolicy(60, retry_delay, 30.0).delay(retries, retry_after)
    assert 0 <= delay <= MAX_DELAY_S
    assert delay >= min(retry_after or 0.0, MAX_DELAY_S)


def test_delays_double_with_jitter():
    policy = RetryPolicy(60, 1.0, 30.0)
    for retries, longest in enumerate([1.0, 2.0, 4.0, 8.0, 8.0]):
        delays = {policy.delay(retries) for _ in range(100)}
        assert len(delays) > 50
        assert longest / 2 <= min(delays) <= max(delays) <= longest


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, None), ("3", 3.0), ("-1", 0.0), ("nan", 0.0), ("soon", None), ("", None)]
)
def test_retry_after_is_read_as_seconds(value, seconds):
    assert retry_after_seconds({} if value is None else {"retry-after": value}) == seconds


def test_retry_after_is_read_as_a_date():
    seconds = retry_after_seconds({"retry-after": formatdate(time() + 100, usegmt=True)})
    assert seconds is not None and 98 <= seconds <= 100
