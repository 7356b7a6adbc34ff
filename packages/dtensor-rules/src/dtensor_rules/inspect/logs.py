"""Logs which plans are made and which calls are left to torch; silent by default.

Two loggers, at level DEBUG: ``dtensor_rules.misses`` has a line per plan that is made, and
``dtensor_rules.fallthrough`` one per operator and reason for which calls are torch's, again after
`stats_clear()`. A call that finds its plan in the cache comes nowhere near this module.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from dtensor_rules import _core
from dtensor_rules.plan import Move, Output, Plan

VARIABLE = "DTENSOR_RULES_LOGS"
MISSES = logging.getLogger("dtensor_rules.misses")
FALLTHROUGH = logging.getLogger("dtensor_rules.fallthrough")
_LOGGERS = {"misses": MISSES, "fallthrough": FALLTHROUGH}


def configure() -> None:
    """Sends to stderr what DTENSOR_RULES_LOGS names, separated by commas.

    Where the program has handlers of its own, they get it instead.

    Raises:
        ValueError: a name that is none of misses and fallthrough.
    """
    value = os.environ.get(VARIABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    if unknown := [name for name in names if name not in _LOGGERS]:
        raise ValueError(
            f"{VARIABLE}={value!r}: {unknown[0]!r} is none of {', '.join(_LOGGERS)}; "
            f"separate several by commas"
        )
    for name in names:
        logger = _LOGGERS[name]
        logger.setLevel(logging.DEBUG)
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
            logger.addHandler(handler)


def wants_misses() -> bool:
    """Whether anybody listens."""
    return MISSES.isEnabledFor(logging.DEBUG)


def miss(
    op: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    plan: Plan,
    *,
    rule: str | None,
    seconds: float,
) -> None:
    """Says which plan was made for which call.

    Args:
        op: the operator.
        args: its positional arguments.
        kwargs: its keyword-only arguments.
        plan: what calls like this one do from now on.
        rule: the name of the rule that made it; None for torch's propagation.
        seconds: of processor time that it took.
    """
    description, took = call(op, args, kwargs), f"{seconds * 1e6:.0f} us"
    if plan.reason is not None:
        MISSES.debug("%s is torch's: %s; %s", description, plan.reason, took)
        return
    by = "torch's propagation" if rule is None else f"the rule {rule!r}"
    MISSES.debug(
        "%s -> %s; %s; by %s, %s", description, _results(plan), _moves(plan.moves), by, took
    )


def call(op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    """Returns a call as one phrase: the operator, and the specs of its tensors."""
    given = [*map(_shown, args), *(f"{name}={_shown(value)}" for name, value in kwargs.items())]
    return f"{op}({', '.join(given)})"


def left(name: str, reason: str) -> None:
    """Says that calls of an operator are torch's; C++ tells it once per operator and reason."""
    FALLTHROUGH.debug("%s is left to torch: %s", name, reason)


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, DTensor):
        return str(value._spec)
    return f"Tensor{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _results(plan: Plan) -> str:
    if plan.given:
        return ", ".join(map(str, plan.given.values()))
    if not plan.outputs:
        return "one number" if plan.finish is not None else "what is written"
    return ", ".join(map(_result, plan.outputs))


def _result(output: Output) -> str:
    if output is None:
        return "as it is"
    if callable(output):
        return "a DTensor of the local result's shape"
    return str(output) if not isinstance(output, list) else f"[{', '.join(map(str, output))}]"


def _moves(moves: Sequence[Move]) -> str:
    return "; ".join(map(_move, moves)) or "no redistribution"


def _move(move: Move) -> str:
    where = f"argument {move.argument}" + (f"[{move.element}]" if move.element >= 0 else "")
    if move.target is None:
        return f"{where} transformed"
    steps = move.transform.steps if isinstance(move.transform, _core.Redistribution) else None
    by = "torch's own code" if steps is None else ", ".join(type(step).__name__ for step in steps)
    return f"{where} to {move.target} by {by or 'nothing'}"
