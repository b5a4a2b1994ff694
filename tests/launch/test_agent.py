import logging

import pytest

from paceline.launch.agent import _quiet_torch

_LOGGER = "torch.distributed.elastic.agent.server.api"


def test_what_torchs_agent_says_stays_unsaid(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(_LOGGER)
    assert logger.level, "torch gives it a level of its own"
    with _quiet_torch():
        logger.warning("Received 2 death signal, shutting down workers")
    assert caplog.messages == []
    logger.warning("said again")
    assert caplog.messages == ["said again"]
