"""The Newton-Schulz iteration by torch.compile: one graph for each shape, and no other later."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fsdp import fully_shard
from fsdp.optim import Muon
from fsdp.optim.muon.compiled import CompiledNewtonSchulz
from fsdp.optim.muon.newton_schulz import COEFFICIENTS, newton_schulz
from testkit import run_ranks
from testkit.models.matrix_net import (
    MatrixNet,
    full_tensors,
    optimizer_of,
    same_bits,
    sharded,
    train,
)


def test_each_shape_is_compiled_once_with_the_bits_of_the_eager_iteration():
    """aot_eager runs torch's operators; the net has matrices of three shapes."""
    counter = CompileCounterWithBackend("aot_eager")
    model, eager = MatrixNet(), MatrixNet()
    optimizer = optimizer_of(Muon, model, compile_backend=counter)
    losses = train(model, optimizer, 1)
    assert counter.frame_count == 3
    losses += train(model, optimizer, 5, 1)
    assert counter.frame_count == 3
    assert losses == train(eager, optimizer_of(Muon, eager), 6)
    assert same_bits(full_tensors(model), full_tensors(eager)) == []


def test_more_shapes_than_the_recompile_limit_are_compiled():
    limit = torch._dynamo.config.recompile_limit
    counter = CompileCounterWithBackend("eager")
    compiled = CompiledNewtonSchulz(counter)
    for _ in range(2):
        for columns in range(2, limit + 4):
            matrix = torch.randn(3, columns)
            arguments = COEFFICIENTS, 2, 1e-7
            assert torch.equal(compiled(matrix, *arguments), newton_schulz(matrix, *arguments))
    assert counter.frame_count == limit + 2


def test_groups_with_other_options_have_graphs_of_their_own():
    counter = CompileCounterWithBackend("eager")
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:], "ns_steps": 2}]
    optimizer = Muon(groups, compile_backend=counter)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(4, 3)
        optimizer.step()
    assert counter.frame_count == 2


@pytest.mark.ranks
def test_owners_compile_the_shapes_of_their_matrices_and_ranks_agree():
    def check():
        counter = CompileCounterWithBackend("aot_eager")
        model = sharded(fully_shard)
        optimizer = optimizer_of(Muon, model, compile_backend=counter)
        losses = train(model, optimizer, 3)
        return losses, counter.frame_count

    single = MatrixNet()
    expected = train(single, optimizer_of(Muon, single), 3)
    found = run_ranks(check, 2)
    assert [losses for losses, _ in found] == [expected] * 2
    assert sum(graphs for _, graphs in found) == 3  # each matrix on its owner only


def test_backend_that_does_not_exist():
    with pytest.raises(ValueError, match=r"compile_backend .* one of .*'inductor'.* got 'fastest'"):
        Muon([nn.Parameter(torch.zeros(2, 2))], compile_backend="fastest")
