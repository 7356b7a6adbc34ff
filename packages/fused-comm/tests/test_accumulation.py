"""Several backwards per step, missing gradients, and gradients that are not cleared."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fused_comm import GradReducer
from testkit import CommLog, run_ranks

pytestmark = pytest.mark.ranks

R, P, S0 = Replicate(), Partial(), Shard(0)


def model(mesh, seed=0, count=3, dtype=torch.float32):
    torch.manual_seed(seed)
    return [
        torch.nn.Parameter(distribute_tensor(torch.randn(4, 4, dtype=dtype), mesh, [R] * mesh.ndim))
        for _ in range(count)
    ]


def batch(mesh, seed, placements=None, dtype=torch.float32):
    torch.manual_seed(100 + seed)
    placements = placements or [S0] * mesh.ndim
    return distribute_tensor(torch.randn(8, 4, dtype=dtype), mesh, placements)


def loss(params, x):
    for param in params:
        x = torch.tanh(x @ param)
    return x.square().sum()


def full(params):
    return [None if p.grad is None else p.grad.full_tensor() for p in params]


def reference(params, xs):
    """Gradients of one device."""
    single = [p.detach().full_tensor().requires_grad_() for p in params]
    for x in xs:
        loss(single, x.full_tensor()).backward()
    return [p.grad for p in single]


def close(actual, expected):
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("zero_copy", [False, True])
def test_four_microbatches_communicate_once(zero_copy):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh)
        reducer = GradReducer(params, zero_copy=zero_copy)
        results = []
        for step in range(3):
            xs = [batch(mesh, 4 * step + i) for i in range(4)]
            with CommLog() as log:
                with reducer.no_sync():
                    for x in xs[:-1]:
                        loss(params, x).backward()
                        reducer.finish()  # does nothing here
                loss(params, xs[-1]).backward()
                reducer.finish()
            results.append(close(full(params), reference(params, xs)))
            if step:  # the first plans
                results.append(log.counts())
            for param in params:
                param.grad = None
        return results

    once = {"all_reduce": 1}
    assert run_ranks(check, 2) == [[True, True, once, True, once]] * 2


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_gradients_that_are_not_zeroed_are_added_to(zero_copy, op):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh)
        reducer = GradReducer(params, zero_copy=zero_copy, op=op)
        xs = [batch(mesh, i) for i in range(4)]
        for x in xs:
            loss(params, x).backward()
            reducer.finish()
        expected = reference(params, xs)
        return close(full(params), [g / 2 for g in expected] if op == "avg" else expected)

    assert run_ranks(check, 2) == [True] * 2


@pytest.mark.parametrize("zero_copy", [False, True])
def test_gradients_that_are_zeroed_in_place_start_from_zero(zero_copy):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh)
        reducer = GradReducer(params, zero_copy=zero_copy)
        for step in range(3):
            for param in params:
                if param.grad is not None:
                    param.grad.zero_()
            x = batch(mesh, step)
            loss(params, x).backward()
            reducer.finish()
        return close(full(params), reference(params, [x]))

    assert run_ranks(check, 2) == [True] * 2


SECOND_BACKWARD = "a second backward began without finish"


@pytest.mark.filterwarnings(f"ignore:.*{SECOND_BACKWARD}")
@pytest.mark.parametrize("zero_copy", [False, True])
def test_several_backwards_before_one_finish(zero_copy):
    """Whatever came after its bucket was launched goes in a second round."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh)
        reducer = GradReducer(params, zero_copy=zero_copy, bucket_mb=100 / 2**20)
        results = []
        for step in range(3):
            xs = [batch(mesh, 2 * step + i) for i in range(2)]
            first = loss(params, xs[0])
            first.backward(retain_graph=True)
            loss(params, xs[1]).backward()
            first.backward()
            reducer.finish()
            results.append(close(full(params), reference(params, [xs[0], *xs])))
            for param in params:
                param.grad = None
        return all(results)

    assert run_ranks(check, 2) == [True] * 2


@pytest.mark.parametrize("finished", [False, True])
def test_a_second_backward_without_finish_warns_once(finished):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh)
        reducer = GradReducer(params)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                loss(params, batch(mesh, step)).backward()
                if finished or step % 2:
                    reducer.finish()
        return [str(one.message) for one in caught if SECOND_BACKWARD in str(one.message)]

    for messages in run_ranks(check, 2):
        assert len(messages) == (0 if finished else 1)
        assert all("no_sync()" in message for message in messages)


def test_a_second_backward_of_other_parameters_does_not_warn():
    """As of two networks, each with a loss, and one finish() for both; warnings are errors."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh, count=4)
        reducer = GradReducer(params)
        for step in range(3):
            x = batch(mesh, step)
            for half in (params[:2], params[2:]):
                loss(half, x).backward()
            reducer.finish()
            expected = [*reference(params[:2], [x]), *reference(params[2:], [x])]
            assert close(full(params), expected)
            for param in params:
                param.grad = None

    run_ranks(check, 2)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_and_tied_weights(reentrant, captured):
    """Captured parameters, as a module's, get their gradients in backwards within backward."""

    def layer(param, x):
        return torch.tanh(x @ param)

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh, count=2)
        tied = [params[0], params[1], params[0]]
        reducer = GradReducer([*params, params[0]])
        results = []
        for step in range(3):
            x = batch(mesh, step).requires_grad_()
            hidden = x
            for param in tied:
                call = (
                    (functools.partial(layer, param), hidden)
                    if captured
                    else (layer, param, hidden)
                )
                hidden = checkpoint(*call, use_reentrant=reentrant)
            hidden.square().sum().backward()
            reducer.finish()
            whole = [p.detach().full_tensor().requires_grad_() for p in params]
            loss([whole[0], whole[1], whole[0]], x.detach().full_tensor()).backward()
            results.append(close(full(params), [p.grad for p in whole]))
            for param in params:
                param.grad = None
        return all(results)

    assert run_ranks(check, 2) == [True] * 2


def test_parameters_without_gradients():
    """Unused by all, frozen, unfrozen later, and used by one rank only, as experts are."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        used, unused, frozen, expert = model(mesh, count=4)
        frozen.requires_grad_(False)
        reducer = GradReducer([used, unused, frozen, expert])
        seen = []
        for step in range(4):
            if step == 2:
                frozen.requires_grad_(True)
            x = batch(mesh, step)
            total = loss([used], x)
            if step >= 2:
                total = total + loss([frozen], x)
            total.backward()
            if dist.get_rank() == step % 2 and step != 3:  # a part of the sum on one rank only
                local = torch.full((4, 4), float(step + 1))
                expert.grad = DTensor.from_local(local, mesh, [P], run_check=False)
            reducer.finish()
            seen.append([None if g is None else g.sum().item() for g in full([unused, expert])])
            seen[-1].append(close(full([used]), reference([used], [x])))
            seen[-1].append(frozen.grad is None or close(full([frozen]), reference([frozen], [x])))
            for param in (used, unused, frozen, expert):
                param.grad = None
        return seen

    expected = [
        [None, 16.0, True, True],
        [None, 32.0, True, True],
        [None, 48.0, True, True],
        [None, None, True, True],
    ]
    assert run_ranks(check, 2) == [expected] * 2


def test_bf16_gradients_accumulate_in_fp32():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh, dtype=torch.bfloat16, count=1)
        (param,) = params
        reducer = GradReducer(params, accumulate_dtype=torch.float32)
        with reducer.no_sync():
            for step in range(16):
                loss(params, batch(mesh, step, dtype=torch.bfloat16)).backward()
                assert param.grad is None  # it is in the sum
        loss(params, batch(mesh, 16, dtype=torch.bfloat16)).backward()
        reducer.finish()
        actual = param.grad.full_tensor()
        reducer.remove()
        total = torch.zeros(4, 4)
        for step in range(17):
            param.grad = None
            loss(params, batch(mesh, step, dtype=torch.bfloat16)).backward()
            total += param.grad.to_local().float()
        dist.all_reduce(total)
        return actual.dtype, torch.equal(actual, total.bfloat16())

    assert run_ranks(check, 2) == [(torch.bfloat16, True)] * 2


@pytest.mark.parametrize("target", [(R, R), (R, S0)])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_one_axis_may_be_deferred(target, op):
    """HSDP: reduced within a replica each time, across replicas with the last microbatch."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        param = torch.nn.Parameter(distribute_tensor(torch.zeros(6, 2), mesh, target))
        reducer = GradReducer([param], op=op)
        results = []
        for step in range(2):
            total = torch.zeros(6, 2)
            for micro in range(3):
                last = micro == 2
                reducer.set_requires_gradient_sync(last, axes=["replicate"])
                torch.manual_seed(100 * step + 10 * micro + dist.get_rank())
                local = torch.randn(6, 2)
                total += local
                grad = DTensor.from_local(local, mesh, [P, P], run_check=False)
                reducer.accumulate(param, grad)
                reducer.finish()
                expected = target if last else (P, target[1])
                results.append(param.grad.placements == expected)
            dist.all_reduce(total)
            actual = param.grad.full_tensor()
            results.append(torch.allclose(actual, total / 4 if op == "avg" else total, atol=1e-6))
            param.grad = None
        return all(results)

    assert run_ranks(check, 4) == [True] * 4


def test_buckets_are_in_the_order_in_which_gradients_are_computed():
    """Also where no rank has all of them in the first step."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh, count=3)
        reducer = GradReducer([(name, param) for name, param in zip("abc", params, strict=True)])
        loss([params[2], params[0]], batch(mesh, 0)).backward()  # a comes first, then c
        if dist.get_rank() == 1:
            params[2].grad = None
        local = torch.ones(4, 4)
        params[1].grad = DTensor.from_local(local, mesh, [P], run_check=False)
        reducer.finish()
        return [bucket.names for bucket in reducer.report().buckets]

    assert run_ranks(check, 2) == [[("a", "c", "b")]] * 2


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_gradient_that_is_replicated_already_is_not_summed_again(op):
    """As one that a script has reduced itself."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        (param,) = model(mesh, count=1)
        reducer = GradReducer([param], op=op)
        for placement in (P, R):
            local = torch.full((4, 4), 2.0)
            param.grad = DTensor.from_local(local, mesh, [placement], run_check=False)
            reducer.finish()
        return param.grad.placements == (R,), param.grad.to_local().unique().tolist()

    assert run_ranks(check, 2) == [(True, [2.0])] * 2


def test_a_scattered_axis_may_be_deferred():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        param = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [R, S0]))
        reducer = GradReducer([param])
        placements = []
        for micro in range(2):
            reducer.set_requires_gradient_sync(micro == 1, axes=["shard"])
            local = torch.full((4, 2), float(1 + dist.get_rank()))
            reducer.accumulate(param, DTensor.from_local(local, mesh, [P, P], run_check=False))
            reducer.finish()
            placements.append(param.grad.placements)
        return placements, param.grad.full_tensor().unique().tolist()

    expected = [(R, P), (R, S0)]
    assert run_ranks(check, 4) == [(expected, [20.0])] * 4


def test_gradients_of_other_tensors_are_accumulated():
    """Of plain tensors that share the parameters' memory: two backwards, the first not synced."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = model(mesh)
        reducer = GradReducer(params, bucket_mb=1e-4)
        for _ in range(2):
            leaves = [p._local_tensor.detach().requires_grad_() for p in params]
            for number, x in enumerate((batch(mesh, 1), batch(mesh, 2))):
                reducer.set_requires_gradient_sync(number == 1)
                loss(leaves, x.to_local()).backward()
                for leaf, param in reversed([*zip(leaves, params, strict=True)]):
                    grad = DTensor.from_local(leaf.grad, mesh, [P], run_check=False)
                    leaf.grad = None
                    reducer.accumulate(param, grad)
            reducer.finish()
            assert all(param.grad.placements == (R,) for param in params)
            assert close(full(params), reference(params, [batch(mesh, 1), batch(mesh, 2)]))
            for param in params:
                param.grad = None
        with pytest.raises(ValueError, match="expected a parameter of this reducer"):
            reducer.accumulate(model(mesh)[0], params[0].detach())

    run_ranks(check, 2)
