"""The products of a block of code, from torch's execution trace; its collectives: test_comm_log."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from testkit import CommLog, fake_mesh


def test_products_are_counted_in_forward_and_backward():
    linear, batched = nn.Linear(8, 16), torch.ones(3, 4, 8)
    with CommLog() as log:
        (linear(batched[0]).sum() + torch.bmm(batched, batched.mT).sum()).backward()
    # Forward; backward of the weight alone, as the input has no gradient; three small matrices.
    assert log.product_flops == 2 * (2 * 4 * 8 * 16) + 3 * (2 * 4 * 8 * 4)


def test_attention_is_two_products_forward_and_five_backward():
    query = torch.ones(2, 4, 16, 8, requires_grad=True)
    with CommLog() as log:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum()
    assert log.product_flops == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    with CommLog() as log:
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert log.product_flops == 7 * (2 * 2 * 4 * 16 * 16 * 8)


def test_attention_of_fewer_keys_than_queries_has_the_flops_of_as_many():
    query, key = torch.ones(2, 4, 16, 8), torch.ones(2, 2, 16, 8)
    key.requires_grad_()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with CommLog() as log:
        attention(query, key, key)[0].sum().backward()
    assert log.product_flops == 7 * (2 * 2 * 4 * 16 * 16 * 8)


def test_of_dtensors_the_local_products_count_and_no_other_whether_dtensor_has_met_them_or_not():
    with fake_mesh((4,), ("tp",)) as mesh:
        weight = DTensor.from_local(torch.ones(8, 4, requires_grad=True), mesh, [Shard(1)])
        given = DTensor.from_local(torch.ones(2, 8), mesh, [Replicate()])
        for _ in range(2):
            with CommLog() as log:
                product = given @ weight
                product.to_local().sum().backward()
            assert product.shape == (2, 16)
            assert log.product_flops == 2 * (2 * 2 * 8 * 4)


def test_products_are_known_when_the_block_has_ended():
    with CommLog() as log, pytest.raises(RuntimeError, match="expected a block that has ended"):
        _ = log.product_flops
    assert log.product_flops == 0
