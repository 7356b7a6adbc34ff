"""Suggestions of `generate_static` for modules that do not run on local tensors."""

import io
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Plan, generate_static, parallelize
from testkit import CommLog, run_ranks

pytestmark = pytest.mark.ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
IN_PLAN = {"Replicate": Replicate, "Shard": Shard, "Partial": Partial}


class Rows(nn.Module):
    """Its own code needs full rows of the output of its first Linear."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).softmax(-1))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Rows() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Head(nn.Module):
    """A loss over classes, written by a test."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)

    def forward(self, x, y):
        return self.loss(self.head(self.body(x)), y)


def own_cross_entropy(logits, y):
    return -logits.log_softmax(-1).gather(-1, y[:, None]).mean()


def with_z_loss(logits, y):
    return F.cross_entropy(logits, y) + 1e-3 * logits.logsumexp(-1).square().mean()


def of_maxima(logits, y):
    return (logits - logits.amax(-1, keepdim=True)).exp().mean()


def column_parallel(mesh):
    return Plan(mesh).shard("<in>", R).shard(r"(.*\.)?up\.(weight|bias)", S0, "tp")


def sharded_classes(mesh):
    return Plan(mesh).shard("<in>", R).shard("<in:y>", R).shard("head.weight", S0, "tp")


def batch():
    torch.manual_seed(1)
    return torch.randn(6, 8), torch.randint(0, 16, (6,))


def tp_mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def trained(model, args, steps=3):
    """Returns losses and parameters of SGD."""
    losses = []
    for _ in range(steps):
        loss = model(*args).square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.5 * param.grad
                param.grad = None
    params = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return torch.stack(losses), torch.cat([one.detach().flatten() for one in params])


def generated(plan, model, args, **options):
    """Returns the warning or the error of `generate_static`, and the plan if there is one."""
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("plan_api").addHandler(handler)
    try:
        made = generate_static(plan, model, args, **options)
    except ValueError as error:
        return str(error), None
    finally:
        logging.getLogger("plan_api").removeHandler(handler)
    return handler.stream.getvalue(), made


def entries_of(text):
    return re.findall(r"^plan\..*$", text, re.MULTILINE)


def pasted(make):
    """Returns suggestions before and after pasting, the plan, and whether it trains right."""
    plan = column_parallel(tp_mesh())
    args = batch()[:1]
    text, _ = generated(plan, make(), args)
    for line in entries_of(text):
        exec(line, {"plan": plan, **IN_PLAN})
    again, made = generated(plan, make(), args)
    found = trained(parallelize(make(), made, mode="static"), args)
    return text, again, str(made), [*map(torch.allclose, found, trained(make(), args))]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (Rows, 'plan.shard("up.<out>", Replicate(), "tp")'),
        (Layers, r'plan.shard(r"layers\.\d+\.up.<out>", Replicate(), "tp")'),
    ],
)
def test_pasted_lines_let_all_modules_run_on_local_tensors_and_train_as_one_device(make, line):
    for text, again, made, same in run_ranks(pasted, 2, make):
        assert entries_of(text) == [line]
        assert "aten._softmax of S(1)" in text
        assert again == ""
        assert "eager(" not in made
        assert same == [True, True]


def of_losses():
    mesh, args, found = tp_mesh(), batch(), {}
    for loss in (own_cross_entropy, with_z_loss, of_maxima):
        found[loss.__name__] = generated(sharded_classes(mesh), Head(loss), args)[0]
    made = generate_static(sharded_classes(mesh), Head(F.cross_entropy), args)
    static = parallelize(Head(F.cross_entropy), made, mode="static", guard_steps=0)
    with CommLog() as log:
        same = torch.allclose(static(*args), Head(F.cross_entropy)(*args))
    return found, same, max(call.output_bytes for call in log.calls)


def test_no_entry_gathers_the_classes_of_a_loss():
    for found, same, largest in run_ranks(of_losses, 2):
        for loss in ("own_cross_entropy", "with_z_loss"):
            assert "torch.nn.functional.cross_entropy takes them so" in found[loss]
        assert "aten.logsumexp of S(1)" in found["with_z_loss"]
        assert all(entries_of(text) == [] for text in found.values())
        assert same  # sharded classes, as it suggests
        assert largest < 6 * 16 * 4 / 2  # bytes of a rank's logits


def row_parallel():
    plan = column_parallel(tp_mesh()).shard("down.weight", S1, "tp")
    return generated(plan, Rows(), batch()[:1])[0]


def test_entries_that_do_not_help_are_not_suggested():
    for text in run_ranks(row_parallel, 2):
        assert "aten._softmax of S(1)" in text
        assert entries_of(text) == []
        assert "module of its own" in text


def without_sending():
    return generated(column_parallel(tp_mesh()), Layers(), batch()[:1], fake=True)[0]


def test_fake_tensors_give_no_suggestions():
    for text in run_ranks(without_sending, 2):
        assert "runs on DTensors" in text
        assert "fake=True" in text
