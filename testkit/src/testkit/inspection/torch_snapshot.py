"""Takes snapshots of torch's global state: functions, tables, kernels, hooks and flags."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch

# Imported before the first snapshot, as importing them later would count as a change: torch._dynamo
# replaces torch.manual_seed, the others register operators.
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.utils._python_dispatch as python_dispatch
import torch.utils._pytree as pytree
from torch import overrides
from torch.distributed.tensor import DTensor
from torch.optim import optimizer

from testkit.ranks.python_command import run_python

_CODE = (
    FunctionType, BuiltinFunctionType, MethodDescriptorType, staticmethod, classmethod, property,
)  # fmt: skip
_BY_VALUE = (str, int, bool, tuple, type(None))

# Of CPython's type objects: C code may set this field, and nothing in Python reads it.
_OFFSET_OF_TP_GETATTR = 64

_Identity = tuple[object, ...]


@dataclass(frozen=True)
class TorchSnapshot:
    """The state of torch, by paths such as ``torch.nn.init.orthogonal_``.

    Attributes:
        modules: the names of the loaded modules of torch.
        operators: the names of the registered operators.
        entries: for each path the objects that are compared by identity. For a function these are
            the function, its code and its defaults, so that a replaced code is a change.
    """

    modules: frozenset[str]
    operators: frozenset[str]
    entries: Mapping[str, _Identity]

    def changes(self) -> list[str]:
        """Compares the snapshot with the present state of torch.

        Returns:
            the paths that were added, removed or have another value, sorted. Modules and operators
            that were loaded or defined since are not compared.
        """
        now = _entries(self.modules, self.operators)
        paths = self.entries.keys() | now.keys()
        return sorted(path for path in paths if not _same(self.entries.get(path), now.get(path)))


def torch_snapshot() -> TorchSnapshot:
    """Takes a snapshot of what a package may replace or register in torch.

    It has the functions and classes of every module of torch, and the members of these classes;
    DTensor's dispatcher with its tables of strategies and handlers; the kernels of every operator
    at every dispatch key; hooks of optimizers, modules and saved tensors; active modes; pytree
    nodes; safe globals of `torch.load`; the default dtype, threads, deterministic algorithms. It
    does not have values that torch itself changes, such as caches and counters.

    Take the first snapshot in a new process, before the package is imported.
    """
    # torch.ops and torch.classes load their members on access.
    modules = frozenset(
        name
        for name in sys.modules
        if name.partition(".")[0] == "torch" and not name.startswith(("torch.ops", "torch.classes"))
    )
    operators = frozenset(torch._C._dispatch_get_all_op_names())
    return TorchSnapshot(modules, operators, _entries(modules, operators))


_SCRIPT = """
import json, sys, warnings
from testkit.inspection.torch_snapshot import torch_snapshot
warnings.simplefilter("error")
before, scope, found = torch_snapshot(), {}, []
for statement in sys.argv[1:]:
    exec(statement, scope)
    found.append(before.changes())
print(json.dumps(found))
"""


def changes_by(*statements: str, timeout: float = 240.0) -> list[list[str]]:
    """Runs statements in a process that has imported torch alone, in which warnings are errors.

    Args:
        *statements: Python source, run in order in one namespace.
        timeout: seconds for all of them.

    Returns:
        for each statement, `TorchSnapshot.changes` after it, compared with the state before the
        first.

    Raises:
        RuntimeError: a statement failed; has its traceback.
    """
    done = run_python("-c", _SCRIPT, *statements, preloaded=False, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"changes_by: exit code {done.returncode}\n{done.stderr}")
    changes: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return changes


def importing(package: str, *, without: Sequence[str] = ()) -> str:
    """Returns code that imports a package and each of its modules except ``__main__``.

    Args:
        package: its name.
        without: names of modules that need what is not installed.
    """
    return f"""
import importlib, pathlib, {package}
root = pathlib.Path({package}.__file__).parent
for path in sorted(root.rglob("*.py")):
    if path.name not in ("__init__.py", "__main__.py"):
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        if name not in {list(without)}:
            importlib.import_module(name)
"""


def _entries(modules: frozenset[str], operators: frozenset[str]) -> dict[str, _Identity]:
    entries: dict[str, _Identity] = {}
    for name in modules:
        entries |= _members(name, sys.modules[name])
    for path, table in _tables():
        entries |= {f"{path}[{key}]": (value,) for key, value in table.items()}
    for name in operators:
        entries[f"kernels of {name}"] = (torch._C._dispatch_dump(name),)
    entries |= {path: (value,) for path, value in _settings()}
    return entries


def _members(name: str, module: ModuleType) -> Iterator[tuple[str, _Identity]]:
    for key, value in list(vars(module).items()):
        # type(), as isinstance() makes deprecated objects warn.
        if not issubclass(type(value), (type, *_CODE)):
            continue
        yield f"{name}.{key}", _identity(value)
        if issubclass(type(value), type) and value.__module__ == name:
            for member, own in list(vars(value).items()):
                if issubclass(type(own), _CODE):
                    yield f"{name}.{key}.{member}", _identity(own)


def _identity(value: Any) -> _Identity:
    if type(value) in (staticmethod, classmethod):
        return (value, *_identity(value.__func__))
    if type(value) is not FunctionType:
        return (value,)
    keywords = value.__kwdefaults__ or {}
    # torch._dynamo caches its function in an attribute at the first call.
    attributes = {key: entry for key, entry in value.__dict__.items() if "dynamo" not in key}
    defaults = (*keywords, *keywords.values(), *attributes, *attributes.values())
    return (value, value.__code__, value.__defaults__, *defaults)


def _tables() -> Iterator[tuple[str, Mapping[Any, Any]]]:
    dispatcher: Any = DTensor._op_dispatcher
    for path, owner in (
        ("DTensor._op_dispatcher", dispatcher),
        ("DTensor._op_dispatcher.sharding_propagator", dispatcher.sharding_propagator),
    ):
        yield path, {key: entry for key, entry in vars(owner).items() if callable(entry)}
        for key, table in vars(owner).items():
            if type(table) is dict:
                yield f"{path}.{key}", table
            elif type(table) is set:
                yield f"{path}.{key}", dict.fromkeys(table)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        yield f"torch.optim.optimizer.{name}", dict(enumerate(vars(optimizer)[name].values()))
    for name, hooks in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield f"torch.nn.modules.module.{name}", dict(enumerate(hooks.values()))
    yield "torch.serialization safe globals", dict.fromkeys(torch.serialization.get_safe_globals())
    yield "torch.utils._pytree.SUPPORTED_NODES", pytree.SUPPORTED_NODES
    # torch 2.15 registers its own backends when the first group of each is created.
    plugins = torch.distributed.Backend._plugins
    registered = {
        name: plugin
        for name, plugin in plugins.items()
        if not plugin.creator_fn.__module__.startswith("torch.")
    }
    yield "torch.distributed.Backend._plugins", registered


def _settings() -> Iterator[tuple[str, object]]:
    yield "default dtype", torch.get_default_dtype()
    yield "threads", torch.get_num_threads()
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "hooks of saved tensors", torch._C._autograd._top_saved_tensors_default_hooks(True)
    yield "function modes", tuple(map(id, overrides._get_current_function_mode_stack()))
    yield "dispatch modes", tuple(map(id, python_dispatch._get_current_dispatch_mode_stack()))
    yield "DTensor's tp_getattr", c_void_p.from_address(id(DTensor) + _OFFSET_OF_TP_GETATTR).value


def _same(before: _Identity | None, now: _Identity | None) -> bool:
    if before is None or now is None or len(before) != len(now):
        return before is now
    return all(map(is_, before, now)) or all(
        a is b or (type(a) in _BY_VALUE and a == b) for a, b in zip(before, now, strict=True)
    )
