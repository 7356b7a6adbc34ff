"""NorMuon: normalizes the rows of an orthogonalized matrix by running means of their squares.

Source: Li et al., NorMuon: Making Muon more efficient and scalable (arXiv 2510.05491), with the
Frobenius norm kept as in the authors' code (github.com/zichongli5/NorMuon, ``normuon_update``) and
the dtypes and constants of ``_normuon_normalization_core`` in github.com/microsoft/dion,
dion/normuon.py.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import StateDict

from fsdp.optim.matrix.assignment import MatrixTask
from fsdp.optim.matrix.matrices import check_even_shards
from fsdp.optim.matrix.state import state_dtype, zeros_on_owner
from fsdp.optim.state_dict import check_same_sharding

__all__ = [
    "SECOND_MOMENTUM", "check_second_momentum", "new_second_momentum", "normalize_rows",
    "second_momentum_name",
]  # fmt: skip

SECOND_MOMENTUM = "second_momentum_buffer"
_EPS = 1e-8


def normalize_rows(
    update: torch.Tensor, second_momentum: torch.Tensor, beta2: float
) -> torch.Tensor:
    """Divides each row by the root of the running mean of its mean square.

    The result is scaled to the Frobenius norm of `update`, so that adjusted learning rates fit it.

    Args:
        update: the orthogonalized matrix, of r rows and c columns, bfloat16.
        second_momentum: running mean for each row, (r, 1), float32 or wider; it is updated.
        beta2: decay rate of the running mean.

    Returns:
        The normalized matrix, (r, c), rounded from the dtype of `second_momentum` to bfloat16, in
        which it is sent to the shards.
    """
    values = update.to(second_momentum.dtype)
    norm = values.norm()
    second_momentum.lerp_(values.square().mean(dim=-1, keepdim=True), 1 - beta2)
    normalized = values / (second_momentum.sqrt() + _EPS)
    result: torch.Tensor = normalized * (norm / normalized.norm().clamp(min=_EPS))
    return result.to(update.dtype)


def second_momentum_name(matrix: int) -> str:
    """Returns the name of the state of a parameter's matrix."""
    return f"{SECOND_MOMENTUM}.{matrix}"


def new_second_momentum(
    param: torch.Tensor, tasks: list[MatrixTask], device: torch.device, name: str
) -> StateDict:
    """Returns the row statistics of a parameter before its first step, on the matrices' owners.

    Args:
        param: the parameter.
        tasks: its matrices and their owners.
        device: device of the tensors.
        name: its name, for errors.

    Returns:
        For matrix n of r rows, "second_momentum_buffer.n": zeros of (r, 1), float32 or float64.

    Raises:
        ValueError: ranks have different numbers of matrices; it names the parameter.
    """
    if tasks:
        check_even_shards(param, tasks[0].matrix.distinct_axes, name, "Muon")
    return {
        second_momentum_name(n): zeros_on_owner(param, task, (task.matrix.shape[0], 1), device)
        for n, task in enumerate(tasks)
    }


def check_second_momentum(
    state: StateDict, param: torch.Tensor, tasks: list[MatrixTask], name: str
) -> None:
    """Checks that loaded row statistics are those of the parameter's matrices, on their owners.

    Args:
        state: loaded state of the parameter, which has row statistics.
        param: the parameter.
        tasks: its matrices and their owners.
        name: its name, for errors.

    Raises:
        ValueError: it has those of other matrices, or of another dtype or placement.
    """
    found = {key for key in state if key.startswith(SECOND_MOMENTUM)}
    expected = new_second_momentum(param, tasks, torch.device("meta"), name)
    if other := sorted(found ^ expected.keys()):
        verb = "has" if other[0] in found else "lacks"
        raise ValueError(
            f"Muon: expected the row statistics of the {len(tasks)} matrices of parameter "
            f"{name!r}, got state that {verb} {other[0]!r}; was it saved with another split?"
        )
    for key, value in expected.items():
        check_same_sharding(state[key], value, f"Muon: {key} of parameter {name!r}")
        if state[key].dtype != state_dtype(param):
            raise ValueError(
                f"Muon: expected {key} of parameter {name!r} to be {state_dtype(param)}, got "
                f"{state[key].dtype}"
            )
