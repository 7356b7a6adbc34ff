"""A layout as JSON: canonical bytes, so that ranks can compare them."""

import json

from ragged_shard.planner.layout import Layout
from ragged_shard.planner.spec import TensorSpec
from ragged_shard.planner.verify import verify

#: Of the format. A reader refuses any other.
VERSION = 1


def to_json(layout: Layout) -> str:
    """Return the layout as JSON: ASCII, sorted keys, no blanks, the same everywhere."""
    fields = {
        "version": VERSION,
        "specs": [
            {"name": spec.name, "numel": spec.numel, "block": spec.block, "shape": spec.shape}
            for spec in layout.specs
        ],
        "world_size": layout.world_size,
        "alignment": layout.alignment,
        "align_starts": layout.align_starts,
        "order": layout.order,
        "starts": layout.starts,
        "shard_size": layout.shard_size,
        "proved_lower_bound": layout.proved_lower_bound,
        "exact": layout.exact,
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def from_json(text: str) -> Layout:
    """Read what ``to_json`` wrote, and verify it.

    Raises:
        ValueError: ``text`` is no JSON, of another version, lacks a field or has an unknown one,
            or describes a layout that ``verify`` refuses.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"Layout.from_json: got no JSON ({error}), wants to_json's text") from None
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != VERSION:
        raise ValueError(f"Layout.from_json: got version {version!r}, wants {VERSION}; plan again")
    del fields["version"]
    try:
        specs = tuple(TensorSpec(**spec) for spec in fields.pop("specs"))
        order, starts = tuple(fields.pop("order")), tuple(fields.pop("starts"))
        layout = Layout(specs=specs, order=order, starts=starts, **fields)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"Layout.from_json: got a layout with a wrong field ({error}), wants to_json's text"
        ) from None
    verify(layout)
    return layout
