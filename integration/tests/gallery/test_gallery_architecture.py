"""The picture of packages: its arrows."""

from integration.gallery.pictures.architecture import Edge, edges


def test_arrows_are_the_requirements_of_the_distributions():
    found = set(edges())
    assert {Edge("fsdp", "dbuffer", False), Edge("plan-api", "ragged-shard", True)} <= found
    assert {edge.source for edge in found if edge.target == "torch"} == {
        "ragged-shard", "fused-comm", "dtensor-rules", "dist-rng",
    }  # fmt: skip
