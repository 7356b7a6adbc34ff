"""torch.nn's modules, all of torch's own database: with every package installed as without.

Plain tensors have the same results, bit for bit. With DTensors what works in torch alone works with
the same results but for rounding; what torch refuses may work, or is refused with an error of the
same type.
"""

import contextlib
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import dist_rng
import dtensor_rules
import fsdp
import plan_api
import ragged_shard
from testkit import run_ranks
from testkit.models import TwoLinears

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Outcome:
    """What a call of a module gave: the leaves of the output and the gradients, or an error."""

    values: tuple[object, ...] = ()
    error: str = ""

    def same(self, other):
        """Whether the values are equal, or the errors are of one type."""
        if self.error != other.error or len(self.values) != len(other.values):
            return False
        return all(map(_equal, self.values, other.values))


def _equal(one, other):
    if not isinstance(one, torch.Tensor):
        return one == other
    if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if isinstance(one, DTensor):
        # plan-api's rules of losses may place results otherwise than torch's, and divide a mean's
        # sum where torch takes the mean.
        one, other = one.full_tensor(), other.full_tensor()
        if one.is_floating_point():
            return torch.allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor):
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)  # some are expanded
    return whole.reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def everything_installed(mesh):
    """dist-rng, dtensor-rules, ragged-shard, fsdp's hook and plan-api's rules, all in effect."""
    plan_api.parallelize(TwoLinears(), plan_api.Plan(mesh), use=("dist-rng", "dtensor-rules"))
    model = fsdp.fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    ragged_shard.install()
    try:
        installed = dist_rng.is_installed(), dtensor_rules.is_enabled(), ragged_shard.is_installed()
        assert installed == (True, True, True)
        yield
    finally:
        del model
        plan_api.uninstall()
        fsdp.uninstall()
        ragged_shard.uninstall()


def samples(info, *, training):
    torch.manual_seed(0)
    return info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )


def outcome(info, sample, *, training, mesh=None, placement=None):
    """Makes a module from a sample of the database, and runs it forward and backward."""
    torch.manual_seed(0)
    try:
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).train(training)
        given = sample.forward_input
        if given is None:
            return Outcome()
        args, kwargs = given.args, given.kwargs
        if mesh is not None:
            module = distribute_module(module, mesh)

            def placed(tensor):
                at = placement if tensor.dim() else Replicate()
                leaf = distribute_tensor(tensor.detach(), mesh, [at])
                return leaf.requires_grad_(tensor.requires_grad)

            args, kwargs = pytree.tree_map_only(torch.Tensor, placed, (args, kwargs))
        output = pytree.tree_leaves(module(*args, **kwargs))
        sources = [*module.parameters(), *_needing_grad((args, kwargs))]
        results = list(_needing_grad(output))
        grads = ()
        if results and sources:
            total = sum(one.sum() for one in results)
            grads = torch.autograd.grad(total, sources, allow_unused=True)
        return Outcome((*output, *grads))
    except Exception as error:  # the kind is compared: whatever torch raises
        return Outcome(error=type(error).__name__)


def _needing_grad(tree):
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.dtype.is_floating_point:
            yield leaf


def all_outcomes(first, **options):
    training = options["training"]
    found = {}
    for info in module_db:
        if not (training or "mesh" in options or info.train_and_eval_differ):
            continue  # it has been looked at in training
        for number, sample in enumerate(samples(info, training=training)[:first]):
            found[f"{info.name} {number}"] = outcome(info, sample, **options)
    return found


def compared(**options):
    """Outcomes without and with the packages: how many worked, and which differ.

    ``first`` is the number of samples of each module; None: all.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of deprecated arguments in the samples
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        if "placement" in options:
            options["mesh"] = mesh
        before = all_outcomes(**options)
        with everything_installed(mesh):
            after = all_outcomes(**options)
    assert before.keys() == after.keys()
    differ = [name for name in before if not before[name].same(after[name])]
    worked = [name for name in before if not before[name].error]
    more = [name for name in differ if before[name].error and not after[name].error]
    errors = {name: (before[name].error, after[name].error) for name in differ}
    return len(before), worked, more, {name: errors[name] for name in differ if name not in more}


@pytest.mark.parametrize(
    ("training", "first", "many"),
    [
        pytest.param(True, 3, 300, id="training"),
        pytest.param(True, None, 1700, id="training, all", marks=pytest.mark.slow),
        pytest.param(False, None, 200, id="eval"),
    ],
)
def test_modules_on_plain_tensors_have_the_same_bits(training, first, many):
    options = {"training": training, "first": first}
    [(count, worked, more, differ)] = run_ranks(compared, 1, **options, timeout=300)
    assert differ == {}
    assert more == []
    assert len(worked) > many
    assert count - len(worked) < 20  # what the samples of some modules do not fit


# DTensors take torch a hundred times as long: two samples of each module at most.
@pytest.mark.parametrize(
    ("placement", "first"),
    [
        pytest.param(Replicate(), 1, id="replicated", marks=pytest.mark.slow),
        pytest.param(Replicate(), 2, id="replicated, two", marks=pytest.mark.slow),
        pytest.param(Shard(0), 2, id="sharded", marks=pytest.mark.slow),  # a minute and a half
    ],
)
def test_modules_on_dtensors_have_the_same_results_or_are_refused_alike(placement, first):
    """In eval: what is random in training is another number with dist-rng, one device's."""
    options = {"training": False, "placement": placement, "first": first}
    [(count, worked, more, differ)] = run_ranks(compared, 1, **options, timeout=300)
    assert differ == {}, f"with the packages also {more} work"
    assert len(worked) > count // 3
