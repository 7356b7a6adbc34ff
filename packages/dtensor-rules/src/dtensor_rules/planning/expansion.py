"""Chooses an operator's strategy on several mesh axes without building all of them.

Note: torch describes most operators by strategies for one mesh axis: rows of placements, of the
results and then of the inputs. `expand_to_full_mesh_op_strategy` multiplies the rows with
themselves once per axis, drops the products that do not hold jointly, and computes for every one
left what it costs to redistribute every input to it; `_select_min_cost_strategy` then takes one:
where nothing has to move, the last such product; else the first that costs nothing; else the
first of the cheapest. `expand` returns the same strategies with all left out that neither this
choice, nor that for lists of tensors (the first of the cheapest, whatever moves), can take. Torch
then chooses among them as ever.

What cannot move is found axis by axis, and costs nothing. Otherwise the products are visited in
torch's order, and left out as soon as the axes seen so far cost more than the cheapest known
product: each axis on which a shard or a partial value has to change takes at least one collective
there. An axis on which an input is replicated is never fixed beforehand: to shard a replica is
free, and makes what other axes transfer smaller.

Torch has an unused search with the same purpose, `_dijkstra_expand_single_dim_strategy_to_mesh`,
which gives up on strided shards and does not keep torch's choice among equal costs.

Source: torch/distributed/tensor/_ops/utils.py and _sharding_prop.py of torch 2.13.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtensor_rules import _compat
from dtensor_rules.planning.costs import CostModel
from dtensor_rules.planning.path_search import NoPathError, may_mix
from dtensor_rules.planning.step_times import INF, Codebook, Codes, Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: One strategy on one mesh axis: placements of results, then of inputs; None: no tensor there.
Row = Sequence[Placement | None]
#: The strategy of a product: the index of a row for every axis.
Product = tuple[int, ...]


class _UnsupportedError(Exception):
    """Raised where torch's own function has to answer."""


def expand(
    mesh: DeviceMesh, op_schema: OpSchema, single_mesh_dim_strategies: list[Row], **options: Any
) -> OpStrategy:
    """Replaces torch's `expand_to_full_mesh_op_strategy`, without strategies that cannot be chosen.

    Args:
        mesh: of the operator.
        op_schema: of the call, with an `OpStrategy` of one spec in the place of every tensor.
        single_mesh_dim_strategies: the rows.
        **options: as torch's function takes them.

    Returns:
        one or two strategies, in torch's order.
    """
    try:
        products = _Products(mesh, op_schema, single_mesh_dim_strategies, _Options.of(options))
        chosen = products.choose()
    except (_UnsupportedError, NoPathError):
        chosen = []
    if chosen:
        return OpStrategy([products.build(product) for product in chosen])
    # Torch answers, and words the error where no strategy holds.
    strategy: OpStrategy = _compat.expand_to_full_mesh(
        mesh, op_schema, single_mesh_dim_strategies, **options
    )
    return strategy


@dataclass(frozen=True)
class _Options:
    """The options of torch's function that are understood here."""

    output_tensor_meta: TensorMeta | Sequence[TensorMeta | None] | None = None
    input_index: int = 1
    inplace_op: bool = False
    allow_unbacked_sharding: bool | None = None  # of sizes that are symbols
    allow_uneven_sharding: bool = False
    different_mesh_args: list[int] | None = None  # inputs on other meshes are torch's
    holds: Callable[[list[DTensorSpec], Any], bool] | None = None

    @staticmethod
    def of(options: dict[str, Any]) -> _Options:
        """Returns torch's options as these.

        Raises:
            _UnsupportedError: there is another.
        """
        named = {_NAMES.get(name, name): value for name, value in options.items()}
        if not named.keys() <= {field.name for field in fields(_Options)}:
            raise _UnsupportedError
        return _Options(**named)


_NAMES = {_compat.VALIDITY_OPTION: "holds"}


class _Products:
    """The products of an operator's rows over the axes of a mesh.

    Raises:
        _UnsupportedError: sizes that are symbols, several meshes, a rank outside the mesh,
            subclasses of specs, rows that differ in which tensors there are.
    """

    def __init__(
        self, mesh: DeviceMesh, op_schema: OpSchema, rows: list[Row], options: _Options
    ) -> None:
        self._mesh, self._rows, self._options = mesh, rows, options
        self._axes = range(mesh.ndim)
        strategies = (*op_schema.args_strategy, *op_schema.kwargs_strategy)
        self._specs = [_only_spec(strategy, mesh) for strategy in strategies]
        if not self._specs or mesh.get_coordinate() is None:
            raise _UnsupportedError
        self._arguments = len(op_schema.args_strategy)  # those behind are keyword arguments
        self._strided_is_order = _strided_is_order(self._specs)

        self._book, topology = Codebook(), Topology(mesh)
        self._sizes = topology.sizes
        self._models = [CostModel(spec, self._book, topology) for spec in self._specs]
        self._positions = _positions(rows)  # those of tensors
        self._first_input = sum(1 for at in self._positions if at < options.input_index)
        if len(self._positions) - self._first_input != len(self._specs):
            raise _UnsupportedError
        self._codes = [self._book.codes([row[at] for at in self._positions]) for row in rows]  # type: ignore[misc]
        if any(dim is not None and dim < 0 for dim in self._book.dims):
            raise _UnsupportedError

        self._is_list = (
            _compat.LISTS_OF_ONE_ARE_TUPLES
            and op_schema.return_type_list_tensor_like()
            and isinstance(options.output_tensor_meta, (list, tuple))
            and not isinstance(options.output_tensor_meta, TensorMeta)
        )

        fixed = self._fixed(op_schema)
        # By axis, the rows that it can have, and what each costs there at least.
        self._bounds = [self._bounds_on(axis, topology.least(axis), fixed) for axis in self._axes]
        self._mixing = self._positions_that_may_mix()
        self._shardable: dict[tuple[int, Codes], bool] = {}

    def choose(self) -> list[Product]:
        """Returns the products that torch can take, in torch's order; none where none holds."""
        staying = self._last_that_moves_nothing()
        cheapest = self._first_of_the_cheapest(INF if staying is None else 0.0)
        return sorted({product for product in (staying, cheapest) if product is not None})

    def build(self, product: Product) -> OpSpec:
        """Returns a product as torch describes it, costs included."""
        results, inputs = self._build_specs(product)
        costs = [[self._cost(at, self._target(product, at))] for at in range(len(self._specs))]
        return OpSpec(output_specs=results, input_specs=inputs, redistribute_cost=costs)

    def _fixed(self, op_schema: OpSchema) -> list[tuple[int, Codes]]:
        """Returns which positions of a row have to be as which placements."""
        fixed: list[tuple[int, Codes]] = []
        if self._options.inplace_op:
            placed = self._models[0].codes
            fixed.append((self._first_input, placed))
            if _compat.IN_PLACE_RESULT_IS_CHECKED:
                fixed.append((0, placed))
        for at, name in enumerate(_compat.checked_outs(op_schema.op)):
            out = op_schema.kwargs_schema.get(name)
            if isinstance(out, OpStrategy):
                if self._positions[at : at + 1] != [at]:
                    raise _UnsupportedError
                placed = self._book.codes(out.strategies[0].output_spec.placements)
                fixed.append((at, placed))
        return fixed

    def _bounds_on(
        self, axis: int, least: float, fixed: list[tuple[int, Codes]]
    ) -> dict[int, float]:
        """Returns the rows that an axis can have, each with what it costs there at least.

        Args:
            axis: of the mesh.
            least: what no collective on it is below.
            fixed: which positions of a row have to be as which placements.
        """
        book = self._book
        # Where a replica was, anything may be without communication.
        costly = [
            (self._first_input + at, before)
            for at, model in enumerate(self._models)
            if book.is_shard[before := model.codes[axis]] or book.is_partial[before]
        ]
        return {
            row: least * sum([codes[at] != before for at, before in costly])
            for row, codes in enumerate(self._codes)
            if all(codes[at] == placed[axis] for at, placed in fixed)
        }

    def _positions_that_may_mix(self) -> list[int]:
        """Returns the positions of a row at which there are partial values of several kinds."""
        kinds = self._book.kinds
        if not _compat.MIXED_PARTIALS_ARE_REFUSED:
            return []
        return [
            at
            for at in range(len(self._positions))
            if len({kind for codes in self._codes if (kind := kinds[codes[at]])}) > 1
        ]

    def _last_that_moves_nothing(self) -> Product | None:
        arguments = range(self._arguments)
        rows = [
            [
                index
                for index in reversed(self._bounds[axis])
                if all(
                    self._codes[index][self._first_input + at] == self._models[at].codes[axis]
                    for at in arguments
                )
            ]
            for axis in self._axes
        ]
        products = itertools.product(*rows)
        return next(
            (product for product in products if self._costs_less(product, INF) == 0.0), None
        )

    def _first_of_the_cheapest(self, known: float) -> Product | None:
        """Returns the first of the products that cost least.

        Args:
            known: a cost that some product is known not to exceed.
        """
        if not all(self._bounds):
            return None
        guess = tuple(min(bounds, key=bounds.__getitem__) for bounds in self._bounds)
        if known == INF and (cost := self._costs_less(guess, INF)) is not None:
            known = cost
        least = [min(bounds.values()) for bounds in self._bounds]
        rest = [sum(least[axis + 1 :]) for axis in self._axes]
        best: Product | None = None

        def visit(prefix: Product, bound: float) -> None:
            nonlocal best, known
            axis = len(prefix)
            if axis == len(self._axes):
                cost = self._costs_less(prefix, known, or_equal=best is None)
                if cost is not None:
                    best, known = prefix, cost
                return
            for row, more in self._bounds[axis].items():
                # Sums of floats depend on their order, by less than this.
                least_cost = (bound + more + rest[axis]) * (1 - 1e-9)
                if least_cost < known or (best is None and least_cost == known):
                    visit((*prefix, row), bound + more)
                if best is not None and known == 0.0:
                    return

        visit((), 0.0)
        return best

    def _costs_less(self, product: Product, known: float, *, or_equal: bool = True) -> float | None:
        """Returns what a product costs if it holds and costs less than a known cost."""
        targets = [self._target(product, at) for at in range(len(self._specs))]
        if not all(itertools.starmap(self._is_shardable, enumerate(targets))):
            return None
        cost = 0.0
        for at, target in enumerate(targets):
            cost += self._cost(at, target)
            if cost > known or (cost == known and not or_equal):
                return None
        return cost if self._holds_jointly(product) else None

    def _target(self, product: Product, at: int) -> Codes:
        return tuple([self._codes[row][self._first_input + at] for row in product])

    def _cost(self, at: int, target: Codes) -> float:
        return self._models[at].cost(target, self._strided_is_order)

    def _is_shardable(self, at: int, target: Codes) -> bool:
        known = self._shardable.get((at, target))
        if known is None:
            known = self._has_enough_elements(at, target) or (
                self._options.allow_uneven_sharding and target == self._models[at].codes
            )
            self._shardable[at, target] = known
        return known

    def _has_enough_elements(self, at: int, target: Codes) -> bool:
        """Returns whether every dim has an element for each of its shards (torch's rule)."""
        shape, shards = self._specs[at].shape, [1] * len(self._specs[at].shape)
        for axis, code in enumerate(target):
            dim = self._book.dims[code]
            if dim is None:
                continue
            if dim >= len(shape):
                return False
            shards[dim] *= self._sizes[axis]
            placement: Any = self._book.placements[code]
            factor = placement.split_factor if self._book.is_strided[code] else 1
            if shape[dim] < shards[dim] * factor:
                return False
        return True

    def _holds_jointly(self, product: Product) -> bool:
        """Returns whether no tensor is partial in two ways, and the operator's own condition."""
        for at in self._mixing:
            kinds = {kind for row in product if (kind := self._book.kinds[self._codes[row][at]])}
            types, reductions = {kind[0] for kind in kinds}, {kind[1] for kind in kinds}
            if len(types) > 1 or not may_mix(reductions):
                return False
        holds = self._options.holds
        if holds is None:
            return True
        results, inputs = self._build_specs(product)
        return results is None or holds(inputs, results)

    def _build_specs(self, product: Product) -> tuple[Any, list[DTensorSpec]]:
        """Returns the specs of the results, as torch nests them, and those of the inputs."""
        options = self._options
        of_results = options.output_tensor_meta
        metas: Sequence[TensorMeta | None] = ()
        if isinstance(of_results, TensorMeta):
            metas = [of_results] * self._first_input
        elif isinstance(of_results, (tuple, list)):
            metas = of_results
        metas = [*metas, *[None] * self._first_input][: self._first_input]
        specs = [
            self._build_spec([self._rows[row][position] for row in product], meta)
            for position, meta in zip(
                self._positions, [*metas, *[spec.tensor_meta for spec in self._specs]], strict=True
            )
        ]
        inputs = specs[self._first_input :]
        at_position = dict(zip(self._positions, specs, strict=True))
        results = tuple(at_position.get(at) for at in range(options.input_index))
        if self._is_list:
            return results, inputs
        if len(results) > 1:
            return results, inputs
        return (results[0] if results else None), inputs

    def _build_spec(self, placements: list[Any], meta: TensorMeta | None) -> DTensorSpec:
        strided = any(isinstance(placement, _StridedShard) for placement in placements)
        return DTensorSpec(
            self._mesh,
            tuple(placements),
            tensor_meta=meta,
            use_strided_shard_as_shard_order=self._strided_is_order if strided else None,
        )


def _only_spec(strategy: OpStrategy, mesh: DeviceMesh) -> DTensorSpec:
    spec = strategy.strategies[0].output_spec
    plain = type(spec) is DTensorSpec and len(strategy.strategies) == 1
    if not plain or spec.tensor_meta is None or spec.mesh != mesh:
        raise _UnsupportedError
    if any(type(size) is not int for size in spec.shape):
        raise _UnsupportedError
    return spec


def _strided_is_order(specs: list[DTensorSpec]) -> bool | None:
    """Returns whether strided shards of the inputs stand for an order of axes; None: no such."""
    if _compat.STRIDED_ORDER_IS_PASSED_ON:
        for spec in specs:
            if any(isinstance(placement, _StridedShard) for placement in spec.placements):
                return spec.use_strided_shard_as_shard_order
    return None


def _positions(rows: list[Row]) -> list[int]:
    """Returns at which positions of the rows there are tensors."""
    kinds = {tuple(placement is None for placement in row) for row in rows}
    if len(kinds) != 1:
        raise _UnsupportedError
    return [at for at, missing in enumerate(kinds.pop()) if not missing]
