"""The options of `parallelize`: their values, and whether each has an effect."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.extras import choose_extras

__all__ = ["Options", "check_in_effect"]

_BUCKET_MB = 25.0


@dataclass(frozen=True)
class Options:
    """What `parallelize` was called with; its text is compared between ranks.

    Attributes:
        mode: ``"eager"`` or ``"static"``.
        guard_steps: calls that are compared with Eager; 0 in Eager.
        src_data_rank: as of `parallelize`.
        bucket_mb: as of `parallelize`; None where nothing was said.
        extras: the optional packages to use, by name.
        warns: whether to warn of gradients that are reduced one by one: the caller has not chosen.
    """

    mode: str
    guard_steps: int
    src_data_rank: int | None
    bucket_mb: float | None
    extras: tuple[str, ...]
    warns: bool

    @property
    def fused_mb(self) -> float | None:
        """Megabytes of a bucket of fused-comm's; None where it is not in use."""
        if "fused-comm" not in self.extras:
            return None
        return _BUCKET_MB if self.bucket_mb is None else self.bucket_mb

    @classmethod
    def checked(
        cls,
        mesh: DeviceMesh,
        mode: str,
        guard_steps: int | None,
        src_data_rank: int | None,
        bucket_mb: float | None,
        use: Sequence[str] | None,
    ) -> Options:
        """The options of a call.

        Args:
            mesh: the plan's.
            mode: as of `parallelize`, like the others.
            guard_steps: None: 1 in static mode.
            src_data_rank: along each axis of the mesh.
            bucket_mb: None: the default.
            use: None: what is installed.

        Raises:
            ValueError: an option has no such value, or would have no effect beside another one.
        """
        if mode not in ("eager", "static"):
            raise ValueError(f"parallelize: mode={mode!r} must be 'eager' or 'static'")
        steps = 1 if mode == "static" else 0
        if guard_steps is not None:
            steps = _index("guard_steps", guard_steps)
        if steps < 0:
            raise ValueError(f"parallelize: guard_steps expected 0 or more, got {steps}")
        if steps and mode == "eager":
            raise ValueError(
                f"parallelize: expected mode='static' for guard_steps, got guard_steps={steps} and "
                f"mode='eager', which has nothing to compare with; leave guard_steps out"
            )
        if src_data_rank is not None:
            rank, size = _index("src_data_rank", src_data_rank), min(mesh.shape)
            if not 0 <= rank < size:
                raise ValueError(
                    f"parallelize: src_data_rank expected a rank along each axis of the mesh, of "
                    f"which the smallest has {size}, got {rank}; give one below {size}, or None"
                )
        extras = choose_extras(use)
        if bucket_mb is not None:
            _check_bucket(bucket_mb, extras)
        return cls(mode, steps, src_data_rank, bucket_mb, extras, use is None)


def check_in_effect(options: Options, model: nn.Module, elsewhere: Collection[str]) -> None:
    """Refuses options that have no effect on a model.

    Args:
        options: of `parallelize`.
        model: any.
        elsewhere: the first names of parameters whose gradients fully_shard reduces.

    Raises:
        ValueError: buckets have a size, and there is no gradient for them.
    """
    if options.bucket_mb is None:
        return
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    if not any(name not in elsewhere for name in trained):
        why = "fully_shard reduces all gradients" if trained else "no parameter requires a gradient"
        raise ValueError(
            f"parallelize: expected gradients for buckets, got bucket_mb={options.bucket_mb}, and "
            f"{why}; leave bucket_mb out"
        )


def _check_bucket(bucket_mb: float, extras: Collection[str]) -> None:
    if not bucket_mb > 0:
        raise ValueError(f"parallelize: bucket_mb expected a number above 0, got {bucket_mb!r}")
    if "fused-comm" not in extras:
        raise ValueError(
            f"parallelize: expected fused-comm for buckets, got bucket_mb={bucket_mb} without it: "
            f"pip install 'plan-api[comm]' and name 'fused-comm' in use= if that is given, or "
            f"leave bucket_mb out"
        )


def _index(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"parallelize: {name} expected an integer, got {value!r}") from None
