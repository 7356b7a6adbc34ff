"""Lines that are counted here, from the files that runs are made by, beside the veScale paper's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plan_api.zoo
import testkit
from integration.models import build_model_on_meta, model_shape
from integration.systems import Degrees, parallelize_llama, zoo
from testkit import fake_mesh
from testkit.code_lines import Built, built_by

# Of the zoo, what refuses options and names placements.
_NO_PLANS = frozenset({"check_options", "expert_axes", "fused", "names_of"})
_MODELS = {"llama": "llama-tiny", "mixtral": "mixtral-tiny", "dit": "dit-tiny"}


@dataclass(frozen=True)
class Lines:
    """Lines of code.

    Attributes:
        model: that are changed in the model.
        plan: that say what is placed where.
        runtime: that the library lacks.
    """

    model: int
    plan: int
    runtime: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.model + self.plan + self.runtime


#: veScale, table 2, by system and model; its DiT is LI-DiT.
PAPER: Mapping[str, Mapping[str, Lines]] = {
    "veScale": {"llama": Lines(0, 29, 0), "mixtral": Lines(0, 38, 0), "dit": Lines(2, 36, 0)},
    "TorchTitan": {
        "llama": Lines(6, 57, 0),
        "mixtral": Lines(6, 79, 15),
        "dit": Lines(8, 48, 39),
    },
    "Megatron-LM": {
        "llama": Lines(126, 0, 0),
        "mixtral": Lines(162, 0, 0),
        "dit": Lines(82, 0, 0),
    },
    "Megatron-DeepSpeed": {
        "llama": Lines(126, 4, 0),
        "mixtral": Lines(162, 4, 10),
        "dit": Lines(82, 4, 0),
    },
}


@dataclass(frozen=True)
class Effort:
    """What training a model takes in one way.

    Attributes:
        family: of the model.
        system: that trains it here; the paper's where none does.
        counted: here; None: it is not written here.
        counterpart: the paper's system.
        paper: its count.
    """

    family: str
    system: str
    counted: Lines | None
    counterpart: str
    paper: Lines


def count_efforts() -> tuple[Effort, ...]:
    """Return every model's ways, ours first; no process group may exist.

    Models are on the meta device and meshes are fake: nothing is computed or sent. No line of a
    model is changed and none of a library added, by either way: all three are others' own files.
    """
    found = []
    for family, name in _MODELS.items():
        found.append(_effort(family, "plan", Lines(0, _lines_of_plan(name), 0), "veScale"))
        written = Lines(0, _lines_of_titan(name), 0) if family == "llama" else None
        found.append(_effort(family, "torchtitan-style", written, "TorchTitan"))
        for system in ("Megatron-LM", "Megatron-DeepSpeed"):
            found.append(_effort(family, system, None, system))
    return tuple(found)


def _effort(family: str, system: str, counted: Lines | None, counterpart: str) -> Effort:
    return Effort(family, system, counted, counterpart, PAPER[counterpart][family])


def _lines_of_plan(name: str) -> int:
    degrees = Degrees(dp_shard=2, tp=2, sp=True)
    with fake_mesh((2, 2), tuple(degrees.axes)) as mesh:

        def call() -> None:
            zoo.plan_of(model_shape(name), mesh, degrees)

        own = built_by(call, _folder(plan_api.zoo), without=_NO_PLANS)
        own += built_by(call, _folder(zoo), functions={"_fully_shard"})
        own += built_by(call, _folder(testkit), functions={"with_noise_loss"})
        return own.lines


def _lines_of_titan(name: str) -> int:
    with fake_mesh((2, 2), ("dp_shard", "tp")) as mesh:
        model = build_model_on_meta(model_shape(name))

        def call() -> None:
            parallelize_llama.apply_tp(model, mesh["tp"], loss_parallel=False)
            parallelize_llama.apply_fsdp(model, mesh["dp_shard"])

        return _built(call, parallelize_llama, {"apply_tp", "apply_fsdp"}).lines


def _built(call: Callable[[], Any], module: Any, functions: set[str]) -> Built:
    return built_by(call, _folder(module), functions=functions)


def _folder(module: Any) -> Path:
    return Path(module.__file__).parent
