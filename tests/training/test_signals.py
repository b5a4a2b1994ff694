import os
import signal

import pytest

from paceline.training.status_exchange import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_becomes_a_flag(number: signal.Signals) -> None:
    with stop_on_signals(under_launcher=True) as flag:
        assert flag.name is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # launchers repeat them
        assert flag.name == number.name


def test_a_second_ctrl_c_interrupts_a_process_of_its_own() -> None:
    def twice() -> None:
        with stop_on_signals(under_launcher=False) as flag:
            os.kill(os.getpid(), signal.SIGINT)
            assert flag.name == "SIGINT"
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 15)])
def test_a_forked_process_is_ended_by_sigterm_alone(number: signal.Signals, status: int) -> None:
    with stop_on_signals(under_launcher=True) as flag:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), number)
            os._exit(0 if flag.name is None else 1)
        assert os.waitpid(child, 0)[1] == status
        assert flag.name is None
