"""Adam8bit in one process: losses close to torch's, a quarter of the memory, options, errors."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fsdp.optim import Adam8bit
from testkit.models.block_net import SIZE, losses, model_of, optimizer_of, step


@pytest.mark.parametrize("decoupled", [True, False])
def test_losses_are_close_to_torchs(decoupled):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    model, reference_model = model_of(), model_of()
    optimizer = optimizer_of(Adam8bit, model, lr=1e-3, decoupled_weight_decay=decoupled)
    reference = kind(reference_model.parameters(), lr=1e-3, weight_decay=0.1)
    for number in range(30):
        assert step(model, optimizer, number) == pytest.approx(
            step(reference_model, reference, number), rel=2e-3
        )


@pytest.mark.parametrize("decoupled", [True, False])
def test_losses_with_fp32_moments_are_torchs(decoupled):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    model, reference_model = model_of(), model_of()
    optimizer = optimizer_of(Adam8bit, model, min_8bit_size=10**9, decoupled_weight_decay=decoupled)
    reference = kind(reference_model.parameters(), lr=1e-2, weight_decay=0.1)
    assert losses(model, optimizer, range(20)) == pytest.approx(
        losses(reference_model, reference, range(20)), rel=1e-4
    )
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.float32


def test_state_is_a_quarter_of_fp32_state():
    param = nn.Parameter(torch.randn(1000, 1000))
    param.grad = torch.randn(1000, 1000)
    optimizer = Adam8bit([param])
    optimizer.step()
    tensors = [value for key, value in optimizer.state[param].items() if key != "step"]
    assert sum(t.numel() * t.element_size() for t in tensors) <= 0.255 * 8 * param.numel()


def test_bfloat16_parameters_are_updated_in_fp32():
    start, grad = torch.randn(50, 40).bfloat16(), torch.randn(50, 40).bfloat16()
    low, high = nn.Parameter(start.clone()), nn.Parameter(start.float())
    low.grad, high.grad = grad.clone(), grad.float()
    for param in (low, high):
        Adam8bit([param], min_8bit_size=0).step()
    assert torch.equal(low, high.bfloat16())


def test_blocks_of_non_contiguous_parameters_follow_the_order_of_elements():
    start, grad = torch.randn(50, 40), torch.randn(50, 40)
    plain, turned = nn.Parameter(start.clone()), nn.Parameter(start.t().contiguous().t())
    plain.grad, turned.grad = grad.clone(), grad.t().contiguous().t()
    for param in (plain, turned):
        optimizer = Adam8bit([param], min_8bit_size=0)
        optimizer.step()
        optimizer.step()
    assert not turned.is_contiguous()
    assert torch.equal(plain, turned)


def test_empty_scalar_and_gradientless_parameters():
    empty, scalar, idle = (nn.Parameter(torch.ones(shape)) for shape in ((0, 3), (), (5,)))
    empty.grad, scalar.grad = torch.zeros(0, 3), torch.tensor(1.0)
    optimizer = Adam8bit([empty, scalar, idle], lr=0.5, min_8bit_size=0)
    optimizer.step()
    assert scalar.item() == pytest.approx(0.5)
    assert torch.equal(idle, torch.ones(5))
    assert idle not in optimizer.state


def test_closure_computes_gradients():
    param = nn.Parameter(torch.ones(300))

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss

    assert Adam8bit([param]).step(closure) == 300
    assert (param < 1).all()


def test_gradient_that_is_not_finite_makes_its_block_nan_with_a_warning():
    param = nn.Parameter(torch.ones(4 * SIZE))
    optimizer = Adam8bit([("a.weight", param)], block_size=SIZE, min_8bit_size=0)
    param.grad = torch.ones(4 * SIZE)
    param.grad[SIZE + 3] = torch.inf
    with pytest.warns(UserWarning, match=r"parameter 'a\.weight' is not finite"):
        optimizer.step()
    param.grad = torch.ones(4 * SIZE)
    optimizer.step()  # warns once
    assert param[SIZE : 2 * SIZE].isnan().all()
    assert param[:SIZE].isfinite().all()
    assert param[2 * SIZE :].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"expected lr .* got -1\.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"block_size": 0}, "expected block_size to be an integer of at least 1, got 0"),
        ({"block_size": 2.0}, r"block_size .* got 2\.0"),
        ({"min_8bit_size": -1}, "min_8bit_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Adam8bit([nn.Parameter(torch.ones(3))], **options)


def test_unsupported_parameters_and_gradients():
    with pytest.raises(ValueError, match=r"'z' .* torch.complex64"):
        Adam8bit([("z", nn.Parameter(torch.ones(3, dtype=torch.complex64)))])
    param = nn.Parameter(torch.ones(3, 3))
    param.grad = torch.eye(3).to_sparse()
    with pytest.raises(ValueError, match="dense gradient of parameter 'w'"):
        Adam8bit([("w", param)]).step()
    optimizer = Adam8bit([param])
    with pytest.raises(ValueError, match="complex64"):
        optimizer.add_param_group({"params": [torch.ones(3, dtype=torch.complex64)]})
    assert len(optimizer.param_groups) == 1


def test_loaded_state_has_the_dtypes_and_values_that_were_saved(tmp_path):
    model = model_of().bfloat16()
    optimizer = optimizer_of(Adam8bit, model)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state")
    other = optimizer_of(Adam8bit, model)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    copied = copy.deepcopy(other)
    pairs = zip(model.parameters(), copied.param_groups[0]["params"], strict=True)
    for param, its_copy in pairs:
        for key, value in optimizer.state[param].items():
            for found in (other.state[param][key], copied.state[its_copy][key]):
                assert found.dtype == value.dtype
                assert torch.equal(found, value)


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-2), "'0.weight' .* another min_8bit_size"),
        (lambda p: Adam8bit(p, block_size=SIZE), "'0.weight' to have 8-bit moments"),
    ],
    ids=["AdamW", "fp32 moments"],
)
def test_state_of_another_optimizer_or_min_8bit_size_is_an_error(make_other, message):
    model = model_of()
    optimizer = optimizer_of(Adam8bit, model)
    step(model, optimizer, 0)
    before = {name: optimizer.state[param] for name, param in model.named_parameters()}
    other = make_other(model.parameters())
    step(model, other, 0)
    state = other.state_dict()
    state["param_groups"] = optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert all(optimizer.state[param] is before[name] for name, param in model.named_parameters())


def test_numpy_integers_become_ints():
    param = nn.Parameter(torch.ones(8))
    optimizer = Adam8bit([param], block_size=np.int64(64), min_8bit_size=np.int64(4))
    (group,) = optimizer.param_groups
    assert (group["block_size"], group["min_8bit_size"]) == (64, 4)
    assert {type(group["block_size"]), type(group["min_8bit_size"])} == {int}
    param.grad = torch.ones(8)
    optimizer.step()
    with pytest.raises(ValueError, match=r"block_size to be an integer .* got 64\.0"):
        Adam8bit([param], block_size=64.0)
