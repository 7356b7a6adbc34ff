"""The simulated device computes what the host does, and has what a device has."""

import pytest
import torch

from testkit import models, sim
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks


def trained(device):
    model = models.llama(num_hidden_layers=1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    torch.manual_seed(0)
    losses = []
    for _ in range(3):
        ids = torch.randint(0, models.VOCABULARY, (2, 8)).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach().cpu() for param in model.parameters()]


def test_a_model_trains_with_the_bits_of_the_cpu():
    def check():
        (losses, params), (expected, wanted) = trained("sim"), trained("cpu")
        return losses == expected, all(map(torch.equal, params, wanted)), losses[0] != losses[-1]

    assert run_sim_ranks(check, 1) == [(True, True, True)]


def test_operators_with_a_kernel_of_the_host_run_it():
    def check():
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        names = [name for name in torch._C._dispatch_get_all_op_names() if has(name, "CPU")]
        kinds = ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")
        return len(names), [
            name
            for name in names
            if any(has(name, f"Composite{kind}") for kind in kinds)
            and not has(name, "PrivateUse1")
            # An earlier call can have imported what registers these in Python.
            and not name.startswith("_c10d_functional::")
        ]

    ((count, missing),) = run_sim_ranks(check, 1)
    assert count > 1000
    assert missing == []


def test_operators_that_view_resize_and_write():
    def check():
        core = sim.load()
        x = torch.arange(12.0, device="sim").view(3, 4)
        rows = x[1:]
        rows.add_(1)
        out = torch.empty(0, device="sim")
        torch.add(x, 1, out=out)
        halves = x.t().chunk(2)
        halves[1].zero_()
        found = [x.cpu(), out.cpu(), x[x > 3].cpu(), torch.cat([x, x]).cpu(), x[[2, 0]].cpu()]
        before = core.memory(0)[0]
        flat = torch.empty(1 << 10, device="sim")
        flat.untyped_storage().resize_(0)
        released = core.memory(0)[0] - before
        flat.untyped_storage().resize_(1 << 12)
        taken = core.memory(0)[0] - before
        pinned = torch.empty(8).pin_memory()
        return found, released, taken, (pinned.is_pinned(), torch.empty(8).is_pinned())

    x = torch.arange(12.0).view(3, 4)
    x[1:] += 1
    out = x + 1
    x[:, 2:] = 0
    wanted = [x, out, x[x > 3], torch.cat([x, x]), x[[2, 0]]]
    ((found, released, taken, pinned),) = run_sim_ranks(check, 1)
    assert all(map(torch.equal, found, wanted))
    assert (released, taken) == (0, 1 << 12)
    assert pinned == (True, False)


def test_tensors_that_are_conjugated_or_negated_lazily():
    def check():
        x = torch.tensor([1 + 2j, 3 - 1j], device="sim", requires_grad=True)
        (x * x.conj() * 1j).imag.sum().backward()
        lazy = x.detach().conj()
        copied = torch.zeros_like(lazy)
        copied.copy_(lazy)
        into = torch.zeros(2, dtype=x.dtype, device="sim").conj()
        into.copy_(x.detach())
        return [one.cpu().resolve_conj() for one in (x.grad, lazy, copied, into, lazy.imag)]

    x = torch.tensor([1 + 2j, 3 - 1j])
    ((grad, lazy, copied, into, imaginary),) = run_sim_ranks(check, 1)
    assert torch.equal(grad, 2 * x)
    assert torch.equal(lazy, x.conj())
    assert torch.equal(copied, x.conj())
    assert torch.equal(into, x)
    assert torch.equal(imaginary, -x.imag)


def test_memory_statistics_have_torch_cudas_names():
    def check():
        device = torch.get_device_module("sim")
        device.reset_peak_memory_stats()
        small = torch.empty(1 << 10, device="sim")
        torch.empty(1 << 12, device="sim")
        found = device.memory_stats()
        return found, device.memory_allocated(), device.max_memory_allocated(), small.nbytes

    ((found, now, peak, nbytes),) = run_sim_ranks(check, 1)
    assert peak - now >= (1 << 14) - nbytes > 0
    assert found["active_bytes.all.current"] == found["reserved_bytes.all.current"] == now
    assert found["active_bytes.all.peak"] == found["allocated_bytes.all.peak"] == peak


def test_streams_devices_and_generators():
    def check():
        device = torch.get_device_module("sim")
        side = device.Stream()
        with device.stream(side):
            inside = device.current_stream().stream_id
        found = [inside == side.stream_id, device.current_stream().stream_id]
        device.set_device(3)
        found += [torch.empty(1, device="sim").device.index, device.current_device()]
        torch.manual_seed(5)
        state = device.get_rng_state()
        torch.manual_seed(6)
        found.append(torch.equal(state, device.get_rng_state()))
        device.set_rng_state(state)
        found.append(torch.equal(state, device.get_rng_state()))
        with pytest.raises(RuntimeError, match="sim: expected a device from 0 to 7, got 8"):
            device.set_device(8)
        return found, str(torch.accelerator.current_accelerator())

    assert run_sim_ranks(check, 1) == [([True, 0, 3, 3, False, True], "sim")]


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_and_histograms(transposed):
    def check():
        def convolved(device):
            torch.manual_seed(0)
            kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
            module = kind(4, 6, 3, stride=2, groups=2).to(device)
            x = torch.randn(2, 4, 9, 9).to(device).requires_grad_()
            y = module(x)
            y.square().sum().backward()
            return [
                each.detach().cpu() for each in (y, x.grad, *(p.grad for p in module.parameters()))
            ]

        counts = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device="sim").histc(4, 0, 3)
        same = all(map(torch.equal, convolved("sim"), convolved("cpu")))
        return same, counts.tolist(), str(counts.dtype)

    assert run_sim_ranks(check, 1) == [(True, [1, 2, 0, 1], "torch.int32")]


def test_autocast_computes_as_on_the_cpu():
    def check():
        def output(device):
            torch.manual_seed(0)
            x, module = torch.randn(4, 8).to(device), torch.nn.Linear(8, 8).to(device)
            with torch.autocast(device, torch.bfloat16):
                return module(x).cpu()

        found, expected = output("sim"), output("cpu")
        return torch.equal(found, expected), str(found.dtype)

    assert run_sim_ranks(check, 1) == [(True, "torch.bfloat16")]
