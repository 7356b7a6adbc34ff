"""The policies of fully_shard in plans: values that plans store, print and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from plan_api.spec.fully_shard_package import value_classes

__all__ = ["POLICIES", "VALUES", "PolicyValue", "checked_dtype", "dtype_name"]

_Stored: TypeAlias = torch.dtype | bool | int | None
# By the option of fully_shard, the classes of torch that it may have.
POLICIES: Mapping[str, tuple[type[Any], ...]] = {
    "mp_policy": (MixedPrecisionPolicy,),
    "offload_policy": (OffloadPolicy, CPUOffloadPolicy),
}
# The options whose classes the fsdp package has, and that parameters may have different values of.
VALUES = ("granularity", "quantize")


@dataclass(frozen=True)
class PolicyValue:
    """A policy of torch or of the fsdp package: some cannot be hashed, none be written as JSON.

    Attributes:
        kind: the class.
        fields: the values that are not the class's defaults, by name.
    """

    kind: type[Any]
    fields: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, what: str, option: str, policy: Any, *, by_function: bool = False) -> PolicyValue:
        """Returns the value of a policy.

        Args:
            what: begins messages.
            option: of fully_shard.
            policy: any value.
            by_function: whether a function has returned it, so that it may have objects which only
                this process has.

        Raises:
            ValueError: it is no such policy, or has something else than dtypes, numbers and flags.
        """
        kind, classes = type(policy), _classes(what, option)
        if kind not in classes:
            expected = " or ".join(one.__name__ for one in classes) or "None"
            source = "torch" if option in POLICIES else "the package that offers fully_shard"
            raise ValueError(f"{what}: {option}: expected {expected} of {source}, got {policy!r}")
        fields = []
        for field in dataclasses.fields(kind):
            value = getattr(policy, field.name)
            if not (by_function or isinstance(value, _Stored)):
                raise ValueError(
                    f"{what}: {option}: expected dtypes, numbers and flags, which a plan can "
                    f"store, got {field.name}={value!r}; leave it out, or call fsdp.fully_shard "
                    f"after parallelize"
                )
            if value != field.default:
                fields.append((field.name, value))
        return cls(kind, tuple(fields))

    def make(self) -> Any:
        """Returns the policy."""
        return self.kind(**dict(self.fields))

    def to_json(self) -> dict[str, Any]:
        """Returns the class's name and the fields; dtypes as ``"bfloat16"``.

        Raises:
            ValueError: a function has returned it, with an object that JSON cannot have.
        """
        for name, value in self.fields:
            if not isinstance(value, _Stored):
                raise ValueError(
                    f"to_json: expected dtypes, numbers and flags, got {self.kind.__name__} with "
                    f"{name}={value!r}, which a function has returned; return a value without it"
                )
        return {"policy": self.kind.__name__} | {
            name: dtype_name(value) if isinstance(value, torch.dtype) else value
            for name, value in self.fields
        }

    @classmethod
    def from_json(cls, what: str, option: str, value: Any) -> PolicyValue:
        """Reads what `to_json` returned.

        Raises:
            ValueError: it is something else, or this torch or package has no such field or dtype.
        """
        given = dict(value) if isinstance(value, Mapping) else {}
        kinds = {one.__name__: one for one in _classes(what, option)}
        kind = kinds.get(given.pop("policy", None))
        known = [] if kind is None else [field.name for field in dataclasses.fields(kind)]
        if kind is None or not set(given) <= set(known):
            raise ValueError(
                f"{what}: {option}: expected a policy such as "
                f'{{"policy": "{next(iter(kinds), "")}"}}, of {", ".join(kinds)}, got {value!r}'
            )
        fields = {
            name: getattr(torch, one, one) if isinstance(one, str) else one
            for name, one in given.items()
        }
        return cls.of(what, option, kind(**fields))

    def __repr__(self) -> str:
        shown = [
            f"{name}={value if isinstance(value, _Stored) else type(value).__name__}"
            for name, value in self.fields
        ]
        return f"{self.kind.__name__}({', '.join(shown)})"


def checked_dtype(what: str, option: str, value: Any) -> torch.dtype:
    """Returns a dtype, which JSON may have by its name.

    Args:
        what: begins the message.
        option: that has it.
        value: any.

    Raises:
        ValueError: it is none.
    """
    found = getattr(torch, value, value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"{what}: {option}: expected a dtype, such as torch.bfloat16, got {value!r}"
        )
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in JSON, ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _classes(what: str, option: str) -> tuple[type[Any], ...]:
    return POLICIES[option] if option in POLICIES else value_classes(what, option)
