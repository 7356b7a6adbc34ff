"""Assertions that two tensors are equal: in bits, in ulps, or within a tolerance.

Each compares dtype and shape first, never broadcasts or converts, and on failure says how many
elements differ, where the first and the worst of them lie, and by how much. Devices, strides and
`requires_grad` do not matter. A complex tensor is compared as its parts, real and imaginary, which
become the last index.

A DTensor on either side stands for its `full_tensor()`. That is a collective: every rank of its
mesh must make the same assertion, on a real process group (a fake one receives nothing).
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ULP_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FAR = torch.iinfo(torch.int64).max  # the distance of what cannot be compared


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Asserts the same dtype, shape and bits.

    Zeros of different sign differ; NaNs are equal only with the same sign and payload.

    Args:
        actual: any dtype, any shape.
        expected: what it should be.
        what: a name for the message, e.g. ``"gradient of wq"``.

    Raises:
        AssertionError: on any difference.
        TypeError: an argument is no tensor.
    """
    got, want = _pair(actual, expected, what)
    differs = _bits(got) != _bits(want)
    _report(differs, got, want, what, "in bits")


def assert_same_tensor(actual: object, expected: object, what: str = "") -> None:
    """Asserts that nothing a program can ask of two tensors differs, bits included.

    That is class, shape, strides, dtype, what autograd knows (`requires_grad`, leaf, graph, view),
    and of DTensors the spec and the local tensors of this rank: no collective is made.

    Args:
        actual: a tensor, or None.
        expected: what it should be.
        what: a name for the message.

    Raises:
        AssertionError: on any difference.
    """
    assert _described(actual) == _described(expected), what
    if isinstance(actual, DTensor) and isinstance(expected, DTensor):
        actual, expected = actual._local_tensor, expected._local_tensor
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        assert_bitwise(actual.detach(), expected.detach(), what)


def _described(tensor: object) -> dict[str, object] | None:
    """Returns a tensor's properties except its values."""
    if not isinstance(tensor, torch.Tensor):
        assert tensor is None, f"{tensor!r} is no tensor"
        return None
    about: dict[str, object] = {
        "type": type(tensor),
        "shape": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "has grad_fn": tensor.grad_fn is not None,
        "is_view": tensor._is_view(),
    }
    if isinstance(tensor, DTensor):
        # Whether torch marks its local tensor as a view of what was received is chance.
        local = (_described(tensor._local_tensor) or {}) | {"is_view": None}
        about |= {"spec": tensor._spec, "local": local}
    return about


def assert_ulp(actual: torch.Tensor, expected: torch.Tensor, max_ulp: int, what: str = "") -> None:
    """Asserts that values are at most `max_ulp` representable numbers apart.

    Zeros of either sign are equal, as are any two NaNs; an infinity equals only itself.

    Args:
        actual: float16, bfloat16, float32 or float64; any shape.
        expected: what it should be.
        max_ulp: units in the last place, of the tensors' own dtype.
        what: a name for the message.

    Raises:
        AssertionError: on a larger difference, or another dtype or shape.
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a negative `max_ulp`.
    """
    if max_ulp < 0:
        raise ValueError(f"assert_ulp: max_ulp={max_ulp} must not be negative")
    got, want = _pair(actual, expected, what)
    if got.dtype not in _ULP_DTYPES:
        raise TypeError(
            f"assert_ulp: {got.dtype} has no ulp here; give one of {[*_ULP_DTYPES]}, "
            "or use assert_bitwise"
        )
    _report(_ulps(got, want) > max_ulp, got, want, what, f"by more than {max_ulp} ulp")


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float, what: str = ""
) -> None:
    """Asserts ``|actual - expected| <= atol + rtol * |expected|``, computed in float64.

    Any two NaNs are equal; an infinity equals only itself.

    Args:
        actual: any dtype, any shape.
        expected: what it should be.
        rtol: relative tolerance.
        atol: absolute tolerance.
        what: a name for the message.

    Raises:
        AssertionError: on a larger difference, or another dtype or shape.
        TypeError: an argument is no tensor.
        ValueError: a tolerance that is negative or NaN.
    """
    if not (rtol >= 0 and atol >= 0):
        raise ValueError(f"assert_close: rtol={rtol} and atol={atol} must not be negative or NaN")
    got, want = _pair(actual, expected, what)
    wide = want.double().abs()
    # rtol times an infinity would allow everything, or be NaN.
    allowed = (atol + rtol * wide).masked_fill(~wide.isfinite(), 0.0)
    _report(
        _distance(got, want) > allowed,
        got,
        want,
        what,
        f"by more than {atol:g} + {rtol:g} x |expected|",
    )


def _pair(actual: object, expected: object, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both as plain detached CPU tensors; checks that dtypes and shapes are equal."""
    got, want = _plain(actual, "actual"), _plain(expected, "expected")
    for name in ("dtype", "shape"):
        have, wish = getattr(got, name), getattr(want, name)
        if have != wish:
            have, wish = (tuple(x) if name == "shape" else x for x in (have, wish))
            raise AssertionError(f"{_title(what)}{name} is {have}, expected {wish}")
    if got.is_complex():
        return torch.view_as_real(got), torch.view_as_real(want)
    return got, want


def _plain(tensor: object, name: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; give a torch.Tensor")
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _title(what: str) -> str:
    return f"{what}: " if what else ""


def _report(
    differs: torch.Tensor, got: torch.Tensor, want: torch.Tensor, what: str, how: str
) -> None:
    """Raises if any element differs, telling of the first and of the worst."""
    if not differs.any():
        return
    flat = differs.flatten()
    distance = _ulps(got, want) if got.dtype in _ULP_DTYPES else _distance(got, want)
    # -1 keeps those that agree behind a difference of no distance, such as -0 against +0.
    worst = int(distance.flatten().masked_fill(~flat, -1).argmax())
    lines = [f"{_title(what)}{int(flat.sum())} of {flat.numel()} elements differ {how}"]
    for name, index in (("first", int(flat.nonzero()[0])), ("worst", worst)):
        position = [int(i) for i in torch.unravel_index(torch.tensor(index), got.shape)]
        a, b = got.flatten()[index], want.flatten()[index]
        ulps = f", {_in_ulps(a, b)}" if got.dtype in _ULP_DTYPES else ""
        lines.append(
            f"  {name} at {position}: actual {_show(a)}, expected {_show(b)}, "
            f"difference {float(_distance(a, b)):.6g}{ulps}"
        )
    raise AssertionError("\n".join(lines))


def _show(element: torch.Tensor) -> str:
    bits = int(_bits(element)) & (256**element.itemsize - 1)
    return f"{element.item()!r} (0x{bits:0{2 * element.itemsize}x})"


def _in_ulps(a: torch.Tensor, b: torch.Tensor) -> str:
    ulps = int(_ulps(a, b))
    return "no finite number of ulp" if ulps == _FAR else f"{ulps} ulp"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTS[tensor.itemsize])


def _same(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got == want) | (got.isnan() & want.isnan())


def _distance(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Returns the absolute difference in float64; infinite for a NaN, or if one is infinite."""
    if got.is_floating_point():
        got, want = got.double(), want.double()
        difference = (got - want).abs()
        difference = difference.masked_fill(difference.isnan(), torch.inf)
        return difference.masked_fill(_same(got, want), 0.0)
    got, want = got.long(), want.long()  # float64 would round integers beyond 2**53
    difference = torch.maximum(got, want) - torch.minimum(got, want)
    return difference.double().masked_fill(difference < 0, torch.inf)  # it has wrapped around


def _ulps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Returns the representable numbers between values, int64; `_FAR` for NaN, inf, overflow."""
    a, b = _ordinal(got), _ordinal(want)
    apart = torch.maximum(a, b) - torch.minimum(a, b)
    far = (apart < 0) | ~got.isfinite() | ~want.isfinite()  # negative: it has wrapped around
    return apart.masked_fill(far, _FAR).masked_fill(_same(got, want), 0)


def _ordinal(tensor: torch.Tensor) -> torch.Tensor:
    """Returns each float's index among the floats of its dtype, int64; both zeros have 0.

    Source: Bruce Dawson, "Comparing Floating Point Numbers, 2012 Edition": the bits of positive
    floats are ordered as the floats are; those of negative ones (sign and magnitude) backwards.
    """
    bits = _bits(tensor)
    lowest = torch.iinfo(bits.dtype).min
    bits = bits.long()
    return torch.where(bits < 0, lowest - bits, bits)
