"""The policies of torch's fully_shard in plans: values that plans store, print and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["POLICIES", "PolicyValue"]

_Value: TypeAlias = torch.dtype | bool | None
# By the option of fully_shard, the classes that it may have.
POLICIES: Mapping[str, tuple[type[Any], ...]] = {
    "mp_policy": (MixedPrecisionPolicy,),
    "offload_policy": (OffloadPolicy, CPUOffloadPolicy),
}


@dataclass(frozen=True)
class PolicyValue:
    """A policy of torch, of which some cannot be hashed, and none can be written as JSON.

    Attributes:
        kind: the class.
        fields: the values that are not the class's defaults, by name.
    """

    kind: type[Any]
    fields: tuple[tuple[str, _Value], ...]

    @classmethod
    def of(cls, what: str, option: str, policy: Any) -> PolicyValue:
        """Returns the value of a policy.

        Args:
            what: begins messages.
            option: ``mp_policy`` or ``offload_policy``.
            policy: any value.

        Raises:
            ValueError: it is no such policy, or has something else than dtypes and flags.
        """
        kind = type(policy)
        if kind not in POLICIES[option]:
            expected = " or ".join(one.__name__ for one in POLICIES[option])
            raise ValueError(f"{what}: {option}: expected {expected} of torch, got {policy!r}")
        fields = []
        for field in dataclasses.fields(kind):
            value = getattr(policy, field.name)
            if not isinstance(value, (torch.dtype, bool, type(None))):
                raise ValueError(
                    f"{what}: {option}: expected dtypes and flags, which a plan can store, got "
                    f"{field.name}={value!r}; leave it out, or call fsdp.fully_shard after "
                    f"parallelize"
                )
            if value != field.default:
                fields.append((field.name, value))
        return cls(kind, tuple(fields))

    def make(self) -> Any:
        """Returns the policy."""
        return self.kind(**dict(self.fields))

    def to_json(self) -> dict[str, Any]:
        """Returns the class's name and the fields; dtypes as ``"bfloat16"``."""
        return {"policy": self.kind.__name__} | {
            name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            for name, value in self.fields
        }

    @classmethod
    def from_json(cls, what: str, option: str, value: Any) -> PolicyValue:
        """Reads what `to_json` returned.

        Raises:
            ValueError: it is something else, or this torch has no such field or dtype.
        """
        given = dict(value) if isinstance(value, Mapping) else {}
        kind = {one.__name__: one for one in POLICIES[option]}.get(given.pop("policy", None))
        known = [] if kind is None else [field.name for field in dataclasses.fields(kind)]
        if kind is None or not set(given) <= set(known):
            raise ValueError(f"{what}: {option}: expected a policy of this torch, got {value!r}")
        fields = {
            name: getattr(torch, one, one) if isinstance(one, str) else one
            for name, one in given.items()
        }
        return cls.of(what, option, kind(**fields))

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(f'{name}={one}' for name, one in self.fields)})"
