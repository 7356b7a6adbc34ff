r"""The paths of a plan's entries: a regular expression over modules, and a tensor's name.

`layers\.\d+\.mlp\.up_proj\.weight` names parameters and buffers by their full names;
`layers\.\d+\.mlp.<in>` names inputs of these modules, `<out>` their outputs. `<in:2>` and
`<in:hidden_states>` choose an argument, by its position in the signature of `forward` or by its
name; `<in>` alone is the first. `weight.grad` is a gradient. `<op:dropout>` names the calls of
a function of torch in the forward of these modules, and `<op:reshape:1>` the second of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["PathKind", "TensorPath", "generalize_numbers", "parse_path", "path_code"]

_ACTIVATION = re.compile(r"(?P<module>.*?)(?:\\?\.)?<(?P<kind>in|out|op)(?::(?P<index>[^<>]+))?>")
_GRADIENT = re.compile(r"(?P<name>.+?)\\?\.grad")


class PathKind(Enum):
    """What a path names."""

    STATE = "state"  # a parameter or a buffer
    GRADIENT = "grad"
    INPUT = "<in>"
    OUTPUT = "<out>"
    OPERATOR = "<op>"
    MODULE = "module"


@dataclass(frozen=True)
class TensorPath:
    """A parsed path.

    Attributes:
        text: as the user wrote it.
        pattern: a regular expression for the full name of a parameter, a buffer or a module.
        kind: what it names there.
        index: the number or name of the argument or result, or the function of an operator; 0 for
            state and gradients.
    """

    text: str
    pattern: str
    kind: PathKind
    index: int | str = 0

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a full name."""
        return re.fullmatch(self.pattern, name) is not None

    def under(self, prefix: str) -> TensorPath:
        """Returns the path in a model that has this path's model as its submodule ``prefix``."""
        inner = f"(?:{self.pattern})"
        dotted = re.escape(prefix) + (rf"\.{inner}" if self.pattern else "")
        return TensorPath(f"{prefix}.{self.text}", dotted, self.kind, self.index)


def parse_path(text: str, names_modules: bool = False) -> TensorPath:
    """Parses a path.

    Args:
        text: a regular expression of a module's path, then the tensor, as `Plan.shard` takes it.
        names_modules: whether it names modules instead of tensors; the empty path is the model.

    Raises:
        ValueError: it is empty, no regular expression, or names something else in angle brackets.
    """
    if names_modules:
        if "<" in text and ">" in text:
            raise ValueError(f"path {text!r} has to name modules: leave out <in> and <out>")
        return _checked(TensorPath(text, text, PathKind.MODULE))
    if found := _ACTIVATION.fullmatch(text):
        kind = PathKind(f"<{found['kind']}>")
        if kind is PathKind.OPERATOR and not found["index"]:
            raise ValueError(f"path {text!r}: name the function, as in <op:dropout>")
        index = found["index"] or "0"
        return _checked(TensorPath(text, found["module"], kind, _number(index)))
    if "<" in text and ">" in text[text.index("<") :] and "(?" not in text:
        raise ValueError(
            f"path {text!r}: only <in>, <in:INDEX>, <in:NAME>, <out>, <out:INDEX>, <out:NAME> "
            f"and <op:FUNCTION> may be in angle brackets, at the end"
        )
    if found := _GRADIENT.fullmatch(text):
        return _checked(TensorPath(text, found["name"], PathKind.GRADIENT))
    if not text:
        raise ValueError("path '' names nothing: give a parameter, or <in> or <out> of a module")
    return _checked(TensorPath(text, text, PathKind.STATE))


def generalize_numbers(path: str) -> str:
    """Returns a pattern that matches this path and all that differ from it in numbers only."""
    return re.sub(r"(?<![^.])\d+(?![^.])", r"\\d+", re.escape(path).replace(r"\.", ".")).replace(
        ".", r"\."
    )


def path_code(pattern: str, tensor: str = "") -> str:
    """Formats a path as Python code, for remedies.

    Args:
        pattern: of modules.
        tensor: in angle brackets; "" for modules.
    """
    text = f"{pattern}.{tensor}" if pattern and tensor else pattern + tensor
    return f'r"{text}"' if "\\" in text else f'"{text}"'


def _number(index: str) -> int | str:
    return int(index) if index.isdecimal() else index


def _checked(path: TensorPath) -> TensorPath:
    try:
        re.compile(path.pattern)
    except re.error as error:
        raise ValueError(f"path {path.text!r} is no regular expression: {error}") from error
    return path
