"""DTensor.redistribute, from_local and to_local beside torch's own, forward and backward."""

import itertools
import threading

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import dtensor_rules
from dtensor_rules import _compat
from testkit import CommLog, assert_bitwise, assert_same_tensor, fake_mesh, run_ranks

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial()
PLACEMENTS = (R, SUM, S0, S1)
NAMES = ("redistribute", "from_local", "to_local")


@pytest.fixture(autouse=True)
def _enabled():
    with dtensor_rules.enabled():
        dtensor_rules.cache_clear()
        dtensor_rules.stats_clear()
        yield


def both(function, *, times=3):
    """What a function gives with torch alone, and with the library at its first and later calls."""
    dtensor_rules.disable()
    expected = function()
    dtensor_rules.enable()
    return expected, [function() for _ in range(times)]


def hits(name):
    return dtensor_rules.stats()[name].cache


def local_of(mesh, placement, shape=(8, 4)):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    if isinstance(placement, Shard):
        return whole.chunk(mesh.size(), placement.dim)[mesh.get_rank()].contiguous()
    return whole + mesh.get_rank()


def forward_and_backward(mesh, source, target, *, grad_target=None):
    """Every method once, with gradients: a list of the tensors that come out."""
    local = local_of(mesh, source).requires_grad_()
    placed = DTensor.from_local(local, mesh, [source])
    moved = placed.redistribute(placements=[target])
    out = moved.to_local()
    moved.retain_grad()
    placed.retain_grad()
    (out * torch.arange(float(out.numel())).reshape(out.shape)).sum().backward()
    with torch.no_grad():
        quiet = placed.redistribute(placements=[target])
        assert quiet.to_local() is quiet._local_tensor
    return [placed, moved, out, moved.grad, placed.grad, local.grad, quiet]


def compare_on_ranks():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for source in PLACEMENTS:
        for target in (R, S0, S1) if source != SUM else PLACEMENTS:
            with CommLog() as log:
                dtensor_rules.disable()
                expected = forward_and_backward(mesh, source, target)
            dtensor_rules.enable()
            for call in range(3):
                with CommLog() as our_log:
                    actual = forward_and_backward(mesh, source, target)
                assert our_log.calls == log.calls, (source, target)
                for index, pair in enumerate(zip(actual, expected, strict=True)):
                    assert_same_tensor(*pair, f"{index} of {source} to {target}, call {call}")
    counted = {name: counts.cache for name, counts in dtensor_rules.stats().items()}
    dtensor_rules.disable()
    return counted


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pair_of_placements_with_gradients(world_size):
    for counted in run_ranks(compare_on_ranks, world_size, timeout=120):
        for method in NAMES:
            assert counted[f"DTensor.{method}"] >= 13
            assert counted[f"DTensor.{method} backward"] >= 13


def on_two_axes():
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.ones(4, 4, requires_grad=True)

    def run():
        placed = DTensor.from_local(local, mesh, (S0, SUM), shape=torch.Size((8, 4)), stride=(4, 1))
        moved = placed.redistribute(mesh, [R, S1])
        (grad,) = torch.autograd.grad(moved.to_local().square().sum(), local)
        return [placed, moved, grad]

    expected, all_actual = both(run)
    for actual in all_actual:
        for pair in zip(actual, expected, strict=True):
            assert_same_tensor(*pair)


@pytest.mark.ranks
def test_a_mesh_of_two_axes_and_a_given_shape():
    run_ranks(on_two_axes, 4, timeout=60)


# The details of what comes out.


def related(local, placed, moved, out):
    """Which of the tensors share what, and which are views of which."""
    tensors = [local, placed._local_tensor, moved._local_tensor, out]
    return [
        (one is other, one._base is other, one.data_ptr() == other.data_ptr(), one._version)
        for one in tensors
        for other in tensors
    ]


@pytest.mark.filterwarnings("ignore:To construct DTensor from torch.Tensor:UserWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("grad_mode", [False, True])
@pytest.mark.parametrize("target", [S0, S1], ids=str)
def test_what_can_be_seen_of_the_results(target, grad_mode, requires_grad):
    with fake_mesh((1,)) as mesh:
        local = torch.ones(4, 4).requires_grad_(requires_grad)

        def run():
            with torch.set_grad_enabled(grad_mode):
                placed = DTensor.from_local(local, mesh, [S0])
                moved = placed.redistribute(placements=[target])
                out = moved.to_local()
            assert placed.device_mesh is mesh
            return [placed, moved, out], related(local, placed, moved, out)

        (expected, relations), all_actual = both(run)
        for actual, our_relations in all_actual:
            assert our_relations == relations
            for pair in zip(actual, expected, strict=True):
                assert_same_tensor(*pair)


def test_the_same_placements_keep_the_local_tensor():
    with fake_mesh((2,)) as mesh:
        placed = DTensor.from_local(torch.ones(2, 2), mesh, [S0])
        for _ in range(2):
            moved = placed.redistribute(placements=[S0])
            assert moved is not placed
            assert moved._local_tensor is placed._local_tensor
    assert hits("DTensor.redistribute") == 1


def test_dims_may_be_negative():
    with fake_mesh((2,)) as mesh:
        for _ in range(2):
            placed = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(-1)])
            assert placed.placements == (S1,)
            assert placed.redistribute(placements=[Shard(-2)]).placements == (S0,)
    assert hits("DTensor.redistribute") == hits("DTensor.from_local") == 1


def test_a_result_on_each_of_two_equal_meshes_has_its_own():
    with fake_mesh((2,)) as mesh:
        other = DeviceMesh("cpu", torch.arange(2))
        assert other == mesh
        for _ in range(2):
            for one in (mesh, other):
                assert DTensor.from_local(torch.ones(2, 2), one, [S0]).device_mesh is one


def every_call(mesh, placements, plain):
    """Each method with each of these placements, and with gradients of the plain ones, by name."""
    found = {}
    for source, target, cut in itertools.product(placements, plain, (False, True)):
        size = [4, 4]
        for one in source:
            if cut and isinstance(one, Shard):  # so that equal shapes are sharded differently
                size[one.dim] //= 2
        local = torch.ones(size, requires_grad=True)
        placed = DTensor.from_local(local, mesh, source)
        moved = placed.redistribute(placements=target)
        (grad,) = torch.autograd.grad(moved.to_local().sum(), local)
        name = (source, target, cut)
        found |= {name: placed, (*name, "moved"): moved}
        found[*name, "gradient"] = grad.clone()  # whether it is a view is chance
        for start in (placed, moved):
            changed = start * 1
            changed.register_hook(lambda grad, to=target: grad.redistribute(placements=to))
            grads = torch.autograd.grad(changed.to_local().sum(), (placed, local))
            found[*name, start is moved, "placed"] = grads[0]
            found[*name, start is moved, "local"] = grads[1].clone()
    return found


@pytest.mark.usefixtures("same_memory_every_time")
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_no_call_is_taken_for_another(shape):
    """All of them while the library knows all others, other than in the tests above."""
    rest = (R,) * (len(shape) - 1)
    odd = [(one, *rest) for one in (SUM, Partial("max"), Partial("min"))]
    plain = [(one, *rest) for one in (R, S0, S1)]
    if rest:
        plain += [(R, S0), (R, S1)]
    elif _compat.RELEASE >= (2, 12):  # 2.11 takes them for shards in another order, and refuses
        odd += [(_StridedShard(0, split_factor=factor),) for factor in (2, 4)]
    with fake_mesh(shape) as mesh:
        expected, all_actual = both(lambda: every_call(mesh, plain + odd, plain))
    for actual in all_actual:
        for name, tensor in expected.items():
            assert_same_tensor(actual[name], tensor, f"{name}")


def test_the_layout_of_the_local_tensor_matters():
    with fake_mesh((2,)) as mesh:
        locals_ = (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3).double())
        locals_ += (torch.ones(3, 3), torch.ones(6))

        def run():
            return [DTensor.from_local(local, mesh, [S0]) for local in locals_]

        expected, all_actual = both(run)
        for actual in all_actual:
            for pair in zip(actual, expected, strict=True):
                assert_same_tensor(*pair)


def test_the_layout_of_the_gradient_matters():
    with fake_mesh((2,)) as mesh:
        x = DTensor.from_local(torch.ones(2, 3), mesh, [S0]).requires_grad_()
        inputs = [x, DTensor.from_local(torch.ones(2, 3), mesh, [R]).requires_grad_()]
        starts = (torch.ones(2, 3), torch.ones(3, 2).t())

        def run():
            pairs = list(itertools.product(inputs, starts))
            grads = [torch.autograd.grad(one.to_local(), one, start)[0] for one, start in pairs]
            saved = [
                (grad._local_tensor.data_ptr() == start.data_ptr(), grad._local_tensor is start)
                for grad, (_, start) in zip(grads, pairs, strict=True)
            ]
            return grads, saved

        (expected, saved), all_actual = both(run)
        for actual, actual_saved in all_actual:
            assert [shares for shares, _ in actual_saved] == [shares for shares, _ in saved]
            if _compat.RELEASE >= (2, 12):  # 2.11 has the gradient itself where others view it
                assert actual_saved == saved
            for pair in zip(actual, expected, strict=True):
                assert_same_tensor(*pair)


def test_the_device_of_the_local_tensor_matters():
    with fake_mesh((2,)) as mesh:
        for _ in range(2):
            for device in ("cpu", "meta"):
                placed = DTensor.from_local(torch.ones(2, 3, device=device), mesh, [S0])
                assert placed.device.type == placed._local_tensor.device.type == device
        meta = DeviceMesh("meta", mesh.mesh, _init_backend=False, _rank=0)
        for _ in range(2):
            for device in ("meta", "cpu"):  # which is moved to where the mesh is
                placed = DTensor.from_local(torch.ones(2, 3, device=device), meta, [S0])
                assert placed._local_tensor.device.type == "meta"


def test_the_shape_and_stride_that_are_given_matter():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(4, 2)
        for given in ((8, 2, 2, 1), (7, 2, 2, 1), (7, 2, 1, 7), (8, 2, 1, 8)):
            shape, stride = given[:2], given[2:]
            for _ in range(2):
                placed = DTensor.from_local(local, mesh, [S0], shape=shape, stride=stride)
                assert (*placed.shape, *placed.stride()) == given
        for _ in range(2):
            with pytest.raises(RuntimeError, match="must be a tuple"):
                DTensor.from_local(local, mesh, [S0], shape=[8, 2], stride=[2, 1])
            with pytest.raises(TypeError, match="'float' object cannot"):
                DTensor.from_local(local, mesh, [S0], shape=(8.0, 2), stride=(2, 1))
            with pytest.raises(RuntimeError, match="dimensionality of sizes"):
                DTensor.from_local(local, mesh, [S0], shape=(8, 2, 2), stride=(1,))
    assert hits("DTensor.from_local") == 4


def test_what_a_partial_reduces_by_matters():
    with fake_mesh((2,)) as mesh:
        for _ in range(2):
            for name in ("max", "min", "sum", "avg"):
                placed = DTensor.from_local(torch.ones(2, 2), mesh, [Partial(name)])
                assert placed.placements == (Partial(name),)
    assert hits("DTensor.from_local") == 4


def test_writing_into_a_view_that_requires_grad_is_refused_as_by_torch():
    with fake_mesh((2,)) as mesh:
        placed = DTensor.from_local(torch.ones(2, 2, requires_grad=True), mesh, [S0])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="created inside a custom Function"):
                placed.to_local().add_(1)


def test_writing_into_a_view_reaches_the_dtensor():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(2, 2)
        for _ in range(2):
            placed = DTensor.from_local(local, mesh, [S0])
            placed.to_local().add_(1)
        assert local.sum() == 12
        assert local._version == placed._local_tensor._version == 2


def test_a_parameter_stays_a_parameter():
    with fake_mesh((2,)) as mesh:
        weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [S0]))
        is_parameter = _compat.RELEASE >= (2, 13)  # torch made a plain tensor of it before
        assert isinstance(weight.to_local(), torch.nn.Parameter) is is_parameter
        with torch.no_grad():
            assert isinstance(weight.to_local(), torch.nn.Parameter) is is_parameter
        assert weight.redistribute(placements=[R]).grad_fn is not None


def test_a_graph_outlives_the_library():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(2, 2, requires_grad=True)

        def graph():
            moved = DTensor.from_local(local, mesh, [S0]).redistribute(placements=[R])
            return moved.to_local().sum()

        graph().backward()
        expected = local.grad.clone()
        last = graph()
        dtensor_rules.disable()
        local.grad = None
        last.backward()
        assert_bitwise(local.grad, expected)
        assert dtensor_rules.cache_info().size == 0
        dtensor_rules.enable()


@pytest.mark.skipif(
    _compat.RELEASE < (2, 12), reason="2.11's redistribute has a first derivative only"
)
def test_second_derivatives():
    with fake_mesh((2,)) as mesh:
        local = torch.full((2, 2), 3.0, requires_grad=True)

        def run():
            out = DTensor.from_local(local, mesh, [S0]).redistribute(placements=[R]).to_local()
            (first,) = torch.autograd.grad((out**3).sum(), local, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), local)
            return [first, second]

        expected, all_actual = both(run)
        for actual in all_actual:
            for pair in zip(actual, expected, strict=True):
                assert_same_tensor(*pair)
    assert dtensor_rules.stats()["DTensor.redistribute backward"].fallthrough["unsupported"] == 2


def test_a_gradient_of_another_dtype_is_torchs():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)

        def run():
            moved = DTensor.from_local(local, mesh, [S0]).redistribute(placements=[R])
            return torch.autograd.grad(moved.float().to_local().sum(), local)[0]

        expected, all_actual = both(run)
        for actual in all_actual:
            assert_same_tensor(actual, expected)


def test_hooks_checkpoints_and_threads():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(2, 2, requires_grad=True)
        seen = []

        def work(tensor):
            placed = DTensor.from_local(tensor, mesh, [S0])
            placed.register_hook(lambda grad: seen.append(type(grad)))
            return placed.redistribute(placements=[R]).to_local()

        def run():
            torch.autograd.grad(checkpoint(work, local, use_reentrant=False).sum(), local)

        run()
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [DTensor] * 5
