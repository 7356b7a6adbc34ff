"""The peak of what is held, not the sum of what was allocated."""

import threading

import torch

from testkit.inspection.memory import peak_bytes


def test_what_was_freed_before_does_not_count():
    def action():
        for _ in range(3):
            torch.zeros(1 << 18)  # 1 MB, freed at once
        return torch.ones(1 << 18)

    most, result = peak_bytes(action)
    assert 1 << 20 <= most < 5 << 18
    assert result.sum() == 1 << 18


def test_what_is_held_together_does():
    most, _ = peak_bytes(lambda: [torch.zeros(1 << 18) for _ in range(3)])
    assert 3 << 20 <= most < 13 << 18


def test_what_another_thread_freed_does_not_count():
    def action():
        for _ in range(3):
            living = [torch.zeros(1 << 18)]
            thread = threading.Thread(target=living.clear)
            thread.start()
            thread.join()

    most, _ = peak_bytes(action)
    assert 1 << 20 <= most < 5 << 18


def test_what_another_thread_holds_does():
    living = []

    def action():
        thread = threading.Thread(target=lambda: living.append(torch.zeros(1 << 18)))
        thread.start()
        thread.join()
        torch.zeros(1)

    most, _ = peak_bytes(action)
    assert 1 << 20 <= most < 5 << 18


def test_what_an_earlier_call_left_makes_room():
    living = []
    peak_bytes(lambda: living.append(torch.zeros(1 << 18)))

    def action():
        living.clear()
        return torch.zeros(1 << 17)

    most, _ = peak_bytes(action)
    assert most < 1 << 17
