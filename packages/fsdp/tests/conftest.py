"""What all of these tests have in common."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """As ranks have: two threads would round some sums otherwise than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
