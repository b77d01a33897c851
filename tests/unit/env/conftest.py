import logging

import pytest


@pytest.fixture(autouse=True)
def levels():
    """Commands set the levels of loggers, for their process."""
    loggers = [logging.getLogger(name) for name in ("strands", "strands_env.core", "opentelemetry")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
