"""One log line in ten minutes instead of one for each request."""

import logging

import pytest

from dynamo_vllm.engine.tiers import full_host


def test_ten_minutes_have_one_line(caplog: pytest.LogCaptureFixture) -> None:
    now, logger = 1000.0, logging.Logger("scheduler")
    logger.addHandler(caplog.handler)
    logger.addFilter(full_host.FullHost(lambda: now))
    for number in range(5):
        logger.warning(full_host.VLLM_SAYS, f"request-{number}")
    logger.warning("something else about %s", "request-1")
    now += 601
    logger.warning(full_host.VLLM_SAYS, "request-6")
    said = caplog.messages
    assert [line.startswith("the host memory for KV caches is full") for line in said] == [True, False, True]
    assert said[1] == "something else about request-1"


def test_a_second_engine_in_a_process_adds_no_second_filter() -> None:
    logger = logging.getLogger(full_host.LOGGER)
    full_host.install()
    full_host.install()
    try:
        assert [type(one) for one in logger.filters] == [full_host.FullHost]
    finally:
        logger.filters.clear()
