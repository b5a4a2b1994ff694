import logging
import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not declared

from paceline.launch.local.elastic_agent import _quiet_torch, _wait_for_nodes

_LOGGER = "torch.distributed.elastic.agent.server.api"


def test_what_torchs_agent_says_stays_unsaid(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(_LOGGER)
    assert logger.level, "torch gives it a level of its own"
    with _quiet_torch():
        logger.warning("Received 2 death signal, shutting down workers")
    assert caplog.messages == []
    logger.warning("said again")
    assert caplog.messages == ["said again"]


def test_nodes_wait_for_each_other() -> None:
    store, left = HashStore(), threading.Semaphore(0)

    def wait() -> None:
        _wait_for_nodes(store, 3, lambda: False)
        left.release()

    nodes = [threading.Thread(target=wait) for _ in range(2)]
    for node in nodes:
        node.start()
    assert not left.acquire(timeout=0.2)
    _wait_for_nodes(store, 3, lambda: False)
    for node in nodes:
        node.join(60)
    assert left.acquire(blocking=False)
    assert left.acquire(blocking=False)


def test_a_node_that_is_to_stop_waits_no_longer() -> None:
    answers = [True, False, False]
    _wait_for_nodes(HashStore(), 2, answers.pop)
    assert answers == []
