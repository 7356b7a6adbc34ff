"""install(): what it patches in torch and for how long; patches accept the original's calls."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.tensor._api as dtensor_api
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import dist_rng
from dist_rng.emulation.device import emulated_device
from dist_rng.philox.geometry import Geometry
from testkit import fake_mesh
from testkit.inspection.call_forms import call_forms
from testkit.inspection.torch_snapshot import changes_by, importing

Call = tuple[tuple[Any, ...], dict[str, Any]]

HANDLERS = "DTensor._op_dispatcher._custom_op_handlers"

_QUERY, _KEY, _VALUE = torch.randn(3, 2, 4, 8, 16).unbind(0)

# Patched functions, and calls of them: by position, by keyword, with defaults.
PATCHED: dict[str, tuple[Any, str, list[Call]]] = {
    "scaled_dot_product_attention": (
        nn.functional,
        "scaled_dot_product_attention",
        [
            ((_QUERY, _KEY, _VALUE), {}),
            ((_QUERY, _KEY, _VALUE, None, 0.0, True), {}),
            ((_QUERY, _KEY, _VALUE, None, 0.5, True), {"scale": 0.3}),
            ((_QUERY, _KEY, _VALUE, torch.ones(8, 8).tril().bool()), {"dropout_p": 0.5}),
            (
                (),
                {
                    "query": _QUERY,
                    "key": _KEY,
                    "value": _VALUE,
                    "attn_mask": None,
                    "dropout_p": 0.5,
                    "is_causal": True,
                    "scale": 0.3,
                    "enable_gqa": False,
                },
            ),
        ],
    ),
    "orthogonal_": (
        nn.init,
        "orthogonal_",
        [
            ((torch.empty(4, 6),), {}),
            ((torch.empty(4, 6), 2.0, None), {}),
            ((), {"tensor": torch.empty(4, 6), "gain": 2.0, "generator": None}),
        ],
    ),
    "sparse_": (
        nn.init,
        "sparse_",
        [
            ((torch.empty(6, 4), 0.5), {}),
            ((torch.empty(6, 4), 0.5, 0.1, None), {}),
            ((), {"tensor": torch.empty(6, 4), "sparsity": 0.5, "std": 0.1, "generator": None}),
        ],
    ),
    "_no_grad_trunc_normal_": (
        nn.init,
        "_no_grad_trunc_normal_",
        [
            ((torch.empty(4, 6), 0.0, 1.0, -2.0, 2.0), {}),
            ((torch.empty(4, 6), 0.0, 1.0, -2.0, 2.0, None), {}),
            ((), {"tensor": torch.empty(4, 6), "mean": 0.0, "std": 1.0, "a": -1.0, "b": 1.0}),
        ],
    ),
}


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    """Starts without patches, and restores what was installed before."""
    before = dist_rng.is_installed()
    dist_rng.uninstall()
    yield
    dist_rng.uninstall()
    if before:
        dist_rng.install()


def _result(function: Callable[..., torch.Tensor], call: Call) -> torch.Tensor:
    args, kwargs = call
    torch.manual_seed(7)
    return function(*args, **kwargs).clone()


def test_import_changes_nothing_in_torch_and_uninstall_restores_everything() -> None:
    imported, installed, removed = changes_by(
        importing("dist_rng"), "dist_rng.install()", "dist_rng.uninstall()"
    )
    assert imported == removed == []
    handlers = [path for path in installed if path.startswith(HANDLERS)]
    assert {f"{HANDLERS}[aten.{op}]" for op in ("uniform_.default", "randn_like.default")} <= {
        *handlers
    }
    assert [path for path in installed if path not in handlers] == [
        "torch.distributed.tensor._api._dtensor_init_helper",
        "torch.nn.functional.scaled_dot_product_attention",
        "torch.nn.init._no_grad_trunc_normal_",
        "torch.nn.init.orthogonal_",
        "torch.nn.init.sparse_",
    ]


def test_an_emulated_device_restores_its_patches_at_the_end_of_the_context() -> None:
    within, after = changes_by(
        "from dist_rng import Geometry; from dist_rng.emulation.device import emulated_device\n"
        "block = emulated_device(Geometry(2, 512)); block.__enter__()",
        "block.__exit__(None, None, None)",
    )
    assert within == [
        "torch.cuda.manual_seed_all",
        "torch.cuda.random.manual_seed_all",
        "torch.get_rng_state",
        "torch.random.get_rng_state",
    ]
    assert after == []


@pytest.mark.parametrize("name", PATCHED)
def test_a_patched_function_accepts_the_calls_of_the_original(name: str) -> None:
    owner, attribute, calls = PATCHED[name]
    original = getattr(owner, attribute)
    expected = [_result(original, call) for call in calls]
    dist_rng.install()
    replaced = getattr(owner, attribute)
    assert replaced is not original
    for call, value in zip(calls, expected, strict=True):
        torch.testing.assert_close(_result(replaced, call), value, rtol=0, atol=0)
    dist_rng.uninstall()
    assert getattr(owner, attribute) is original


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # torch's, without dist-rng
def test_uninstall_leaves_a_function_that_wraps_a_patch_which_then_does_what_torch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As plan-api wraps attention: restoring torch's would remove the other package's patch."""
    dist_rng.install()
    patch = nn.init.sparse_

    def of_another_package(*args: Any, **kwargs: Any) -> torch.Tensor:
        return patch(*args, **kwargs)

    monkeypatch.setattr(nn.init, "sparse_", of_another_package)
    with fake_mesh((2,)) as mesh:
        matrix = distribute_tensor(torch.empty(6, 4), mesh, [Shard(0)], src_data_rank=None)
        nn.init.sparse_(matrix, 0.5)
        dist_rng.uninstall()
        assert nn.init.sparse_ is of_another_package
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            nn.init.sparse_(matrix, 0.5)
        dist_rng.install()
        nn.init.sparse_(matrix, 0.5)
    dist_rng.uninstall()
    assert nn.init.sparse_ is of_another_package


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (dtensor_api, "_dtensor_init_helper"),
        (nn.init, "orthogonal_"),
        (nn.init, "sparse_"),
        (nn.init, "_no_grad_trunc_normal_"),
    ],
)
def test_a_patched_function_has_the_signature_of_the_original(owner: Any, name: str) -> None:
    expected = inspect.signature(getattr(owner, name))
    dist_rng.install()
    assert inspect.signature(getattr(owner, name)) == expected


@pytest.mark.parametrize("module", [torch, torch.random, torch.cuda, torch.cuda.random])
def test_functions_of_an_emulated_device_accept_the_calls_of_the_original(
    module: Any,
) -> None:
    name = "manual_seed_all" if "cuda" in module.__name__ else "get_rng_state"
    original = getattr(module, name)
    forms = call_forms(original, *([7] if name == "manual_seed_all" else []))
    expected = inspect.signature(original)
    with emulated_device(Geometry(2, 512)):
        replaced = getattr(module, name)
        assert replaced is not original
        assert inspect.signature(replaced) == expected
        for form in forms:
            assert type(form.call(replaced)) is type(form.call(original))


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_without_weights_is_torchs_on_plain_tensors(training: bool) -> None:
    module = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True).train(training)
    x = torch.randn(2, 5, 16)

    def attend() -> torch.Tensor:
        torch.manual_seed(7)
        attended: torch.Tensor = module(x, x, x, need_weights=False)[0]
        return attended

    expected = attend()
    dist_rng.install()
    torch.testing.assert_close(attend(), expected, rtol=0, atol=0)
