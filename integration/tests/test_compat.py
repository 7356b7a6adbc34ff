"""Canaries for what differs between versions of torch."""

import pytest

from integration.errors import UsageError
from integration.systems import degrees
from integration.systems.degrees import Degrees
from testkit import KEEPS_ORDER_OF_RANKS, TORCH_RELEASE

HFSDP = {"dp_replicate": 2, "dp_shard": 2, "placements": "hfsdp"}


def test_torch_since_2_12_keeps_the_order_of_ranks():
    assert degrees.keeps_order_of_ranks() is (TORCH_RELEASE >= (2, 12)) is KEEPS_ORDER_OF_RANKS


def test_hfsdp_is_refused_before_ranks_start_where_torch_sorts_ranks(monkeypatch):
    monkeypatch.setattr(degrees, "keeps_order_of_ranks", lambda: False)
    with pytest.raises(
        UsageError, match=r"hfsdp: expected torch 2.12 or newer, .* use --placements hsdp"
    ):
        Degrees(**HFSDP).check(4)
    Degrees(**HFSDP | {"placements": "hsdp"}).check(4)
