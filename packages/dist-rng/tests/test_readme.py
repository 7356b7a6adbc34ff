"""The README's examples run unchanged, and draw one device's numbers."""

from testkit.inspection.readme import examples, page_examples, run_examples

EXAMPLES = examples(__file__)

# After each example: compares what one device draws with what the example drew.
CHECKS = {
    "DTensor": """
dist_rng.uninstall()
torch.manual_seed(0)
expected = torch.nn.init.trunc_normal_(torch.empty(512, 64))
assert torch.equal(weight.full_tensor(), expected)
assert torch.equal(dropped.full_tensor(), torch.nn.functional.dropout(expected, 0.1))
dist.destroy_process_group()
""",
    "a region": """
torch.manual_seed(0)
assert torch.equal(local, torch.empty(512, 64).normal_(0.0, 0.02)[128:192])
""",
    # 4096 elements fit into one wave of either GPU, so another one draws the same.
    "a geometry": """
with single_device_rng(geometry=Geometry.A100):
    torch.manual_seed(0)
    assert torch.equal(mask, torch.nn.functional.dropout(torch.ones(4096), 0.1) != 0)
assert 0.08 < (~mask).float().mean() < 0.12
""",
}


def test_examples_run_and_equal_one_device(tmp_path):
    checked = zip(EXAMPLES, CHECKS.values(), strict=True)
    begin = "import torch\ntorch.manual_seed(0)\n"
    run_examples([f"{begin}{example}{check}" for example, check in checked], tmp_path)


def test_examples_of_pages_run(tmp_path):
    run_examples(page_examples(__file__), tmp_path)
