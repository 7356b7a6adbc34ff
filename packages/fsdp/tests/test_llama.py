"""An unmodified LLaMA: the same losses as DDP and FSDP2, and the collectives counted."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp
from testkit import CommLog, models, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 10
LAYERS = 3


def _step(model, optimizer, step):
    torch.manual_seed(10 * (step % 3) + dist.get_rank())
    ids = torch.randint(0, models.VOCABULARY, (2, 8))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _model():
    return models.llama(num_hidden_layers=LAYERS)


def _train(model, steps=STEPS):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [_step(model, optimizer, step) for step in range(steps)]


def _shard(fully_shard, model, **options):
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def test_losses_and_parameters_are_those_of_ddp_and_fsdp2_bit_for_bit():
    def check():
        actual, native, replicated = _model(), _model(), _model()
        _shard(fsdp.fully_shard, actual)
        _shard(torch_fully_shard, native)
        losses = [_train(actual), _train(native), _train(DistributedDataParallel(replicated))]
        params = [
            [p.detach().full_tensor() for p in actual.parameters()],
            [p.detach().full_tensor() for p in native.parameters()],
            [p.detach() for p in replicated.parameters()],
        ]
        return losses, params

    for (actual, native, replicated), params in run_ranks(check, 2, timeout=180):
        assert actual == native == replicated
        assert actual[-1] < actual[0]
        for mine, fsdp2, ddp in zip(*params, strict=True):
            assert torch.equal(mine, fsdp2)
            assert torch.equal(mine, ddp)


@pytest.mark.parametrize(
    ("reshard", "gathers"),
    # The root stays unsharded after forward where nobody says otherwise.
    [(None, 2 * LAYERS + 1), (True, 2 * LAYERS + 2), (False, LAYERS + 1)],
)
def test_a_step_is_two_gathers_and_one_reduce_scatter_per_group(reshard, gathers):
    def check():
        model = _model()
        _shard(fsdp.fully_shard, model, strategy="native", reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model, optimizer, 0)
        logs = []
        for step in range(2):
            with CommLog() as log:
                _step(model, optimizer, step)
            logs.append(log.counts())
        return logs

    for logs in run_ranks(check, 2):
        assert logs == [{"all_gather": gathers, "reduce_scatter": LAYERS + 1}] * 2
