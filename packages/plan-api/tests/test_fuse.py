"""Operations put together do what they did one by one."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from plan_api import Plan, lower
from plan_api.lowering.fuse import fuse, last_words
from plan_api.lowering.ir import Act, Moment, Op

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def op(entry=0, path="m", moment=Moment.FORWARD_PRE, index=0, act=Act.REDIST, axis="tp", dst=R):
    tensor = "<out>" if moment is Moment.FORWARD else "<in>"
    return Op(path, moment, tensor, index, act, axis, dst, None, None, None, entry)


def test_one_site_is_one_hook_and_one_tensor_one_step():
    sites = fuse([op(0), op(1, axis="dp", dst=S0), op(2, index=1), op(3, path="n")])
    assert [(site.path, len(site.steps)) for site in sites] == [("m", 2), ("n", 1)]
    first = sites[0].steps[0]
    assert {axis: move.dst for axis, move in first.moves.items()} == {"tp": R, "dp": S0}
    assert first.entries == (0, 1)


def test_a_local_tensor_is_annotated_before_it_is_moved():
    (site,) = fuse([op(0), op(1, act=Act.ANNOTATE, dst=S0)])
    assert [step.act for step in site.steps] == [Act.ANNOTATE, Act.REDIST]


def test_the_same_said_twice_is_no_override():
    ops, overrides = last_words([op(0), op(1), op(2, dst=S0)])
    assert [(o.entry, o.dst) for o in ops] == [(2, S0)]
    assert [(one.earlier.entry, one.later.entry) for one in overrides] == [(1, 2)]


def test_an_override_under_strict_is_an_error(mesh, model):
    plan = Plan(mesh).shard(r".*\.up\.weight", S0, "tp").shard("layers.1.up.weight", S1, "tp")
    assert len(lower(plan, model).overrides) == 1
    with pytest.raises(ValueError, match=r"(?s)overrides itself, under strict=True:\nlayers.1.up"):
        lower(plan, model, strict=True)


OPS = st.builds(
    op,
    path=st.sampled_from(["m", "n"]),
    moment=st.sampled_from([Moment.FORWARD_PRE, Moment.FORWARD]),
    index=st.integers(0, 1),
    act=st.just(Act.REDIST),
    axis=st.sampled_from(["dp", "tp"]),
    dst=st.sampled_from([R, S0, S1]),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPS, max_size=12))
def test_fused_is_equal_to_unfused(ops):
    """Placements of every tensor at every site, after one operation after another, and fused."""
    one_by_one = {}
    for one in ops:
        placed = one_by_one.setdefault((one.path, one.moment, one.index), {})
        placed[one.axis] = one.dst
    fused = {}
    sites = fuse(last_words(ops)[0])
    for site in sites:
        for step in site.steps:
            key = (site.path, site.moment, step.index)
            assert key not in fused  # a tensor is looked at once
            fused[key] = {axis: move.dst for axis, move in step.moves.items()}
    assert fused == one_by_one
    assert len({(site.path, site.moment) for site in sites}) == len(sites)
