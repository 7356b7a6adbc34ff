"""Drawn masks of attention, and their matrices by definition."""

import pytest
import torch
from hypothesis import strategies as st

from plan_api import AttentionMask


@pytest.fixture(scope="session")
def masks():
    """Returns the strategy that intersects causal, window, documents and padding of a length."""

    @st.composite
    def strategy(draw, length, batch):
        def edges():
            inner = draw(st.sets(st.integers(1, length - 1), max_size=4)) if length > 1 else set()
            return (0, *sorted(inner), length)

        def real():
            start = draw(st.integers(0, length))
            return start, draw(st.integers(start, length))

        rows = st.sampled_from([0, 1, batch])
        documents = tuple(edges() for _ in range(draw(rows))) or None
        tokens = tuple(real() for _ in range(draw(rows))) or None
        window = draw(st.none() | st.integers(1, length + 1))
        return AttentionMask(draw(st.booleans()), window, documents, tokens)

    return strategy


@pytest.fixture(scope="session")
def pairs():
    """Returns a function that makes the matrix of a mask, (rows, length, length)."""

    def matrix(mask, length):
        result = torch.zeros(mask.rows, length, length, dtype=torch.bool)
        for row in range(mask.rows):
            for query in range(length):
                for key in range(length):
                    result[row, query, key] = attends(mask.row(row), query, key)
        return result

    def attends(mask, query, key):
        numbers = [0, 0]
        if mask.documents:
            numbers = [sum(edge <= one for edge in mask.documents[0]) for one in (query, key)]
        start, stop = mask.tokens[0] if mask.tokens else (0, query + key + 1)
        return (
            numbers[0] == numbers[1]
            and (key <= query or not mask.causal)
            and (mask.window is None or abs(query - key) < mask.window)
            and start <= query < stop
            and start <= key < stop
        )

    return matrix
