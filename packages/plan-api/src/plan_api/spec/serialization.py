"""Plans as JSON, to be stored, compared and edited."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.ops.low_precision.recipes import recipe_from_json
from plan_api.spec.arguments import check_chunks
from plan_api.spec.axes import resolve_axes
from plan_api.spec.entry import Entry, EntryKind, Phase
from plan_api.spec.module_policies import CHECKS
from plan_api.spec.param_values import ParamValues
from plan_api.spec.path import parse_path
from plan_api.spec.placements import format_placement
from plan_api.spec.policies import POLICIES, VALUES, PolicyValue, checked_dtype, dtype_name

__all__ = ["entries_from_json", "entries_to_json"]

_VERSION = 1
_LISTS = ("dst", "src", "grad_dst", "grad_src")
_PLAN = ("version", "mesh", "cover", "entries")
_REQUIRED = {"verb", "path", "axes", "dst", "phase"}
_ROW = ("verb", "path", "pattern", "axes", *_LISTS, "options", "phase", "line")
_OPTIONS = {
    EntryKind.SHARD: ("unit",),
    EntryKind.ANNOTATE: ("unit",),
    EntryKind.FACTORY: ("sizes",),
    EntryKind.INDEX: ("count", "flag"),
    EntryKind.DISPATCH: ("tokens", "weights", "count", "chunks", "overlap"),
    EntryKind.FULLY_SHARD: (
        "granularity",
        "reshard_after_forward",
        "flat",
        "replicate",
        "placements",
        "send_dtype",
        *POLICIES,
        *VALUES,
    ),
    EntryKind.CONTEXT: ("method", "order", "ulysses_degree", "heads"),
    EntryKind.SEQUENCE: ("order", "shift", "positions"),
    EntryKind.RECOMPUTE: ("policy",),
    EntryKind.COMPILE: ("backend",),
    EntryKind.PRECISION: ("recipe",),
}
_ALL_REQUIRED = (EntryKind.RECOMPUTE, EntryKind.COMPILE, EntryKind.PRECISION)
_CHECKS = {**CHECKS, "chunks": check_chunks}
_SHORT = re.compile(r"(?P<kind>[RSP])(?:\((?P<argument>\w+)\))?")


def entries_to_json(
    entries: tuple[Entry, ...], mesh: DeviceMesh, cover: bool, of_stage: bool
) -> str:
    """Writes a plan as text.

    Args:
        entries: of the plan.
        mesh: of the plan; its shape and names are written for the reader only.
        cover: whether every parameter has to be named.
        of_stage: whether others of its entries apply to other stages of a pipeline.
    """
    rows = []
    for entry in entries:
        row: dict[str, Any] = {"verb": entry.kind.value, "path": entry.path.text}
        if entry.path != parse_path(entry.path.text, entry.kind.names_modules):  # by Plan.under
            row["pattern"] = entry.path.pattern
        row["axes"] = list(entry.axes)
        for name in _LISTS:
            placements = getattr(entry, name)
            if placements is not None:
                row[name] = [_to_json(placement) for placement in placements]
        if entry.options:
            row["options"] = {name: _option_to_json(value) for name, value in entry.options}
        rows.append(row | {"phase": entry.phase.value, "line": entry.line})
    shape = dict(zip(mesh.mesh_dim_names or range(mesh.ndim), mesh.shape, strict=True))
    plan = {"version": _VERSION, "mesh": shape, "cover": cover, "entries": rows}
    plan |= {"of_stage": True} if of_stage else {}
    return json.dumps(plan, indent=1) + "\n"


def entries_from_json(text: str, mesh: DeviceMesh) -> tuple[list[Entry], bool, bool]:
    """Reads the entries of a plan for a mesh with their axes, ``cover`` and ``of_stage``.

    Raises:
        ValueError: the text is no plan of this version, or the mesh lacks an axis.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"expected a plan as Plan.to_json() writes it, got no JSON: {error}"
        ) from None
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ValueError(
            f"expected a plan of version {_VERSION} as Plan.to_json() writes it, got something else"
        )
    _check_names("the plan", found, {*_PLAN, "of_stage"}, set(_PLAN))
    entries = []
    for number, row in enumerate(found["entries"]):
        _check_names(f"entry {number}", row, _ROW, _REQUIRED)
        what = f"{row['verb']}({row['path']!r})"
        lists = {
            name: tuple(_from_json(one, what) for one in row[name]) if name in row else None
            for name in _LISTS
        }
        dst = lists.pop("dst")
        assert dst is not None
        kind = EntryKind(
            _among(row["verb"], [kind.value for kind in EntryKind], f"entry {number}: verb")
        )
        path = parse_path(row["path"], kind.names_modules)
        if "pattern" in row:
            path = type(path)(path.text, row["pattern"], path.kind, path.index)
        axes = resolve_axes(row["axes"], mesh, what)
        phase = Phase(_among(row["phase"], [phase.value for phase in Phase], f"{what}: phase"))
        line = row.get("line", "")
        options = _options_from_json(kind, what, row.get("options", {}))
        entries.append(
            Entry(kind, path, axes, dst, **lists, phase=phase, line=line, options=options)
        )
    return entries, bool(found["cover"]), bool(found.get("of_stage"))


def _option_to_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return value.to_json() if hasattr(value, "to_json") else value


def _option_from_json(what: str, name: str, value: Any) -> Any:
    if name in POLICIES:
        return PolicyValue.from_json(what, name, value)
    if name in VALUES and value is not None:
        return ParamValues.from_json(what, name, value)
    if name == "send_dtype":
        return checked_dtype(what, name, value)
    if name == "recipe":
        return recipe_from_json(what, value)
    return tuple(value) if isinstance(value, list) else value


def _options_from_json(
    kind: EntryKind, what: str, given: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    known = _OPTIONS.get(kind, ())
    required = set(known) if kind in _ALL_REQUIRED else set()
    _check_names(f"{what}: options", given, known, required)
    for name, value in given.items():
        if name in _CHECKS:
            _CHECKS[name](what, value)
    return tuple((name, _option_from_json(what, name, value)) for name, value in given.items())


def _check_names(
    what: str, given: Mapping[str, Any], known: Collection[str], required: Collection[str]
) -> None:
    """Refuses unknown and missing names.

    Raises:
        ValueError: naming them.
    """
    for name in given:
        _among(name, known, what)
    missing = sorted(set(required) - set(given))
    if missing:
        raise ValueError(f"{what}: expected {', '.join(map(repr, missing))}, got none")


def _among(name: str, known: Collection[str], what: str) -> str:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1)
        suggestion = f"; did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(map(repr, known)) or "nothing"
        raise ValueError(f"{what}: expected {listed}, got {name!r}{suggestion}")
    return name


def _to_json(placement: Placement) -> str | dict[str, Any]:
    if type(placement) in (Replicate, Shard, Partial):
        return format_placement(placement)
    kind = type(placement)
    arguments = {name: getattr(placement, name) for name in inspect.signature(kind).parameters}
    return {"type": f"{kind.__module__}:{kind.__qualname__}"} | arguments


def _from_json(value: str | dict[str, Any], what: str) -> Placement:
    if isinstance(value, str):
        found = _SHORT.fullmatch(value)
        if found is None:
            raise ValueError(
                f"{what}: expected a placement such as R, S(0), P or P(avg), got {value!r}"
            )
        if found["kind"] == "S":
            return Shard(int(found["argument"]))
        return Replicate() if found["kind"] == "R" else Partial(found["argument"] or "sum")
    arguments = dict(value)
    module, _, name = arguments.pop("type").partition(":")
    kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and issubclass(kind, Placement)):
        raise ValueError(f"{what}: expected a class of placements, got {module}.{name}")
    made: Placement = kind(**arguments)
    return made
