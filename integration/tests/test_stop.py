"""Which signals are one request to stop, and which are a second one."""

import signal

import pytest

from integration.train import stop


@pytest.fixture
def request_to_stop():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield stop.StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_comes_twice_at_once_is_one_request(request_to_stop):
    # The batch system's and the launcher's: the second must not end the rank before it has saved.
    assert not request_to_stop.requested
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == request_to_stop._note
    signal.raise_signal(signal.SIGTERM)
    assert request_to_stop.requested


def test_a_signal_that_comes_again_later_ends_the_process(request_to_stop, monkeypatch):
    ended = []
    signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(stop.signal, "raise_signal", ended.append)
    monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 0.0)
    request_to_stop._note(signal.SIGTERM, None)
    assert ended == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
