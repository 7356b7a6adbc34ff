"""``Layout``, the result of planning: its report, its JSON, and ``verify``, which checks it."""

import json

from ragged_shard.planner.buffer import BufferMap
from ragged_shard.planner.explain import explain
from ragged_shard.planner.spec import TensorSpec, check_size

#: Of the JSON format. A reader refuses any other.
VERSION = 1


class Layout(BufferMap):
    """A group's tensors in one buffer of equal shards; ``plan_layout`` returns it.

    Nothing is validated on construction; ``verify`` does that.

    Attributes:
        specs: the tensors, in the order in which they were passed.
        world_size: the number of shards.
        alignment: ``shard_size`` is a multiple of it.
        align_starts: whether every start is a multiple of it too.
        order: indices of ``specs``, in the order of the buffer.
        starts: the start of each tensor in the buffer, in the order of ``specs``.
        shard_size: the number of elements of each rank's shard.
        proved_lower_bound: no layout of these specs in this order has a smaller shard.
        exact: whether ``shard_size`` is the smallest for this order. If not, the search reached
            its node limit, and the smallest is between ``proved_lower_bound`` and ``shard_size``.
    """

    def explain(self) -> str:
        """Explains in a few sentences which tensors and which blocks force the padding.

        It plans again with smaller blocks to find what each of them costs, so it takes several
        times as long as planning.
        """
        return explain(self)

    def to_json(self) -> str:
        """Returns the layout as JSON: ASCII, sorted keys, no blanks.

        Equal layouts have the same bytes on every machine.
        """
        fields = {
            "version": VERSION,
            "specs": [
                {"name": spec.name, "numel": spec.numel, "block": spec.block, "shape": spec.shape}
                for spec in self.specs
            ],
            "world_size": self.world_size,
            "alignment": self.alignment,
            "align_starts": self.align_starts,
            "order": self.order,
            "starts": self.starts,
            "shard_size": self.shard_size,
            "proved_lower_bound": self.proved_lower_bound,
            "exact": self.exact,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @staticmethod
    def from_json(text: str) -> "Layout":
        """Reads the text that ``to_json`` wrote, and verifies the layout.

        Raises:
            ValueError: ``text`` is not JSON, is of another version, lacks a field or has an unknown
                one, or describes a layout that ``verify`` refuses.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Layout.from_json: expected the text of to_json, got no JSON ({error})"
            ) from None
        version = fields.get("version") if isinstance(fields, dict) else None
        if version != VERSION:
            raise ValueError(
                f"Layout.from_json: expected version {VERSION}, got {version!r}; plan again"
            )
        del fields["version"]
        try:
            specs = tuple(TensorSpec(**spec) for spec in fields.pop("specs"))
            order, starts = tuple(fields.pop("order")), tuple(fields.pop("starts"))
            layout = Layout(specs=specs, order=order, starts=starts, **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Layout.from_json: expected the text of to_json, got a wrong field ({error})"
            ) from None
        verify(layout)
        return layout

    def fingerprint(self) -> str:
        """Returns the SHA-256 of ``to_json()`` in hex, for ranks to compare."""
        from hashlib import sha256  # loads OpenSSL, which planning does not need

        return sha256(self.to_json().encode()).hexdigest()


def verify(layout: Layout) -> None:
    """Checks that no boundary splits a block, that tensors do not overlap, and that all fit.

    These are the three constraints of veScale-FSDP, section 5: every boundary inside a tensor is
    between two blocks; each tensor is contiguous and they follow one another in ``order``; shards
    are equal, of a multiple of the alignment. It also checks ``align_starts``, ``exact`` and
    ``proved_lower_bound``, as far as that needs no search. It checks the definitions and does not
    use the solver; the time is proportional to the number of tensors.

    Raises:
        ValueError: the first constraint that does not hold, with the tensor and the numbers.
    """
    _check_fields(layout)
    shard, end, before = layout.shard_size, 0, "the buffer's start"
    for i in layout.order:
        spec, start = layout.specs[i], layout.starts[i]
        who = f"tensor {i} ({spec.name!r})"
        if start < end:
            raise ValueError(
                f"{who}: expected a start of {end} or more, after {before}, got {start}"
            )
        end, before = start + spec.numel, who
        if end > layout.buffer_size:
            raise ValueError(
                f"{who}: expected an end of at most {layout.buffer_size}, the end of "
                f"{layout.world_size} shards of {shard}, got {end}"
            )
        if layout.align_starts and start % layout.alignment:
            raise ValueError(
                f"{who}: expected a start that is a multiple of {layout.alignment}, got {start}"
            )
        if spec.numel:
            _check_blocks(who, spec, start, shard)


def _check_blocks(who: str, spec: TensorSpec, start: int, shard: int) -> None:
    """Raises if a boundary strictly inside the tensor splits a block."""
    first = (start // shard + 1) * shard
    last = (start + spec.numel - 1) // shard * shard
    # Boundaries are `shard` apart from the first to the last: two decide for all.
    for boundary in (first, first + shard):
        if boundary <= last and (boundary - start) % spec.block:
            block = (boundary - start) // spec.block
            raise ValueError(
                f"{who}: expected shard boundaries at multiples of {spec.block} after the start "
                f"{start}, got one at {boundary} inside block {block}, elements "
                f"{start + block * spec.block} to "
                f"{min(start + (block + 1) * spec.block, start + spec.numel)} of the buffer"
            )


def _check_fields(layout: Layout) -> None:
    """Raises if a field is wrong by itself, whatever the starts are."""
    for name in ("world_size", "alignment", "shard_size", "proved_lower_bound"):
        least = 1 if name in ("world_size", "alignment") else 0
        check_size(f"Layout {name}", getattr(layout, name), least=least)
    for name in ("align_starts", "exact"):
        if not isinstance(getattr(layout, name), bool):
            raise ValueError(f"Layout {name}: expected a bool, got {getattr(layout, name)!r}")
    check_size("Layout buffer_size", layout.buffer_size, least=0)
    if layout.shard_size % layout.alignment:
        raise ValueError(
            f"Layout shard_size: expected a multiple of the alignment, {layout.alignment}, got "
            f"{layout.shard_size}"
        )
    number = len(layout.specs)
    for index in layout.order:
        check_size("Layout order", index, least=0)
    if sorted(layout.order) != list(range(number)):
        raise ValueError(
            f"Layout order: expected each of 0 to {number - 1} once, got {layout.order}"
        )
    if len(layout.starts) != number:
        raise ValueError(
            f"Layout starts: expected {number}, one per spec, got {len(layout.starts)}"
        )
    for start in layout.starts:
        check_size("Layout starts", start, least=0)
    if layout.proved_lower_bound > layout.shard_size or (
        layout.exact and layout.proved_lower_bound != layout.shard_size
    ):
        raise ValueError(
            f"Layout proved_lower_bound: expected at most shard_size={layout.shard_size}, and "
            f"equal if exact, got {layout.proved_lower_bound} with exact={layout.exact}"
        )
