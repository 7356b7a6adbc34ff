import pytest

from tools.check_wheels import needed
from tools.workspace import packages


@pytest.mark.parametrize(
    ("name", "brought"),
    [
        ("dist-rng", {"dist-rng"}),
        ("plan-api", {"plan-api"}),
        ("fsdp", {"fsdp", "dbuffer", "ragged-shard", "fused-comm"}),
    ],
)
def test_a_package_brings_what_it_declares_and_no_extra(workspace, name, brought):
    assert needed(name, {project.name: project for project in packages(workspace)}) == brought
