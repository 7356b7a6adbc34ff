"""Operations put together do what they did one by one."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from plan_api import Plan, lower
from plan_api.lowering.ir import EntryRef, HookPoint, Op, OpKind
from plan_api.lowering.passes import fuse, resolve_overrides

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def op(
    entry=0,
    path="m",
    hook_point=HookPoint.FORWARD_PRE,
    index=0,
    kind=OpKind.REDIST,
    axis="tp",
    dst=R,
):
    tensor = "<out>" if hook_point is HookPoint.FORWARD else "<in>"
    return Op(path, hook_point, tensor, index, kind, axis, dst, None, None, None, EntryRef(entry))


def test_operations_on_one_tensor_are_one_step_of_one_site():
    sites = fuse([op(0), op(1, axis="dp", dst=S0), op(2, index=1), op(3, path="n")])
    assert [(site.path, len(site.steps)) for site in sites] == [("m", 2), ("n", 1)]
    first = sites[0].steps[0]
    assert {axis: move.dst for axis, move in first.moves.items()} == {"tp": R, "dp": S0}
    assert first.entries == (0, 1)


def test_annotate_comes_before_redistribute():
    (site,) = fuse([op(0), op(1, kind=OpKind.ANNOTATE, dst=S0)])
    assert [step.kind for step in site.steps] == [OpKind.ANNOTATE, OpKind.REDIST]


def test_a_repeated_operation_is_no_override():
    ops, overrides = resolve_overrides([op(0), op(1), op(2, dst=S0)])
    assert [(o.entry.number, o.dst) for o in ops] == [(2, S0)]
    assert [(one.earlier.entry.number, one.later.entry.number) for one in overrides] == [(1, 2)]


def test_an_override_under_strict_is_an_error(mesh, model):
    plan = Plan(mesh).shard(r".*\.up\.weight", S0, "tp").shard("layers.1.up.weight", S1, "tp")
    assert len(lower(plan, model).overrides) == 1
    with pytest.raises(
        ValueError,
        match=r"(?s)strict=True: .* overrides itself:\nlayers.1.up",
    ):
        lower(plan, model, strict=True)


OPS = st.builds(
    op,
    path=st.sampled_from(["m", "n"]),
    hook_point=st.sampled_from([HookPoint.FORWARD_PRE, HookPoint.FORWARD]),
    index=st.integers(0, 1),
    kind=st.just(OpKind.REDIST),
    axis=st.sampled_from(["dp", "tp"]),
    dst=st.sampled_from([R, S0, S1]),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPS, max_size=12))
def test_fused_operations_equal_single_ones(ops):
    """Placements of every tensor at every site, after one operation after another, and fused."""
    one_by_one = {}
    for one in ops:
        placed = one_by_one.setdefault((one.path, one.hook_point, one.index), {})
        placed[one.axis] = one.dst
    fused = {}
    sites = fuse(resolve_overrides(ops)[0])
    for site in sites:
        for step in site.steps:
            key = (site.path, site.hook_point, step.index)
            assert key not in fused  # a tensor is looked at once
            fused[key] = {axis: move.dst for axis, move in step.moves.items()}
    assert fused == one_by_one
    assert len({(site.path, site.hook_point) for site in sites}) == len(sites)
