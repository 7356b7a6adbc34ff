import pytest

from testkit import Collective


def wire(op, given, taken, **kwargs):
    return Collective(op, given, taken, "float32", **kwargs).wire_bytes


def test_gathering_and_scattering_need_no_group():
    assert wire("all_gather", 10, 40) == 30
    assert wire("reduce_scatter", 40, 10) == 30
    assert wire("scatter", 40, 10) == 30
    assert wire("scatter", 0, 10) == 0
    assert wire("gather", 10, 40) == 0
    assert wire("gather", 10, 0) == 10
    assert wire("send", 10, 0) == 10
    assert wire("recv", 0, 10) == 0
    assert wire("barrier", 0, 0) == 0


@pytest.mark.parametrize(("size", "expected"), [(1, 0), (2, 12), (4, 18), (None, None)])
def test_all_reduce(size, expected):
    assert wire("all_reduce", 12, 12, group_size=size) == expected


def test_all_to_all():
    uneven = {"input_splits": (4, 8, 12)}
    assert [wire("all_to_all", 24, 9, group_rank=i, **uneven) for i in range(3)] == [20, 16, 12]
    assert wire("all_to_all", 24, 9, **uneven) is None
    assert wire("all_to_all", 24, 24, input_splits=(8, 8, 8)) == 16
    assert wire("all_to_all", 24, 24) is None


def test_chains():
    def over_ranks(op):
        return [wire(op, 12, 12, group_size=3, group_rank=i, root=1) for i in range(3)]

    assert over_ranks("broadcast") == [0, 12, 12]
    assert over_ranks("reduce") == [12, 0, 12]
    assert wire("broadcast", 12, 12, root=1) is None
    assert wire("reduce", 12, 12, root=1) is None


def test_as_text():
    known = Collective("all_gather", 8, 16, "float32", group="3", group_size=2)
    assert str(known) == "all_gather 8 B -> 16 B float32 (group 3 of 2)"
    assert str(Collective("barrier", 0, 0, "")) == "barrier 0 B -> 0 B no tensor (unknown group)"
