"""The HTML page of a plan on a model, parsed, and drawn by a browser."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import plan_api
from plan_api import Plan, parallelize, track, view
from plan_api.inspect.track import CollectiveEvent, Record, StepPhase
from plan_api.inspect.view.html import DIM_COLOURS, element, placement_colour
from plan_api.inspect.view.rows import format_bytes
from plan_api.inspect.view.tree import Communication, build_tree

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
VOID = {"meta", "input"}


def plan_of(mesh):
    return (
        Plan(mesh)
        .shard(r"layers\.\d+\.up\.(weight|bias)", S0, "tp")
        .shard(r"layers\.\d+\.down\.weight", S1, "tp")
        .shard(r"layers\.\d+.<in>", R, "tp")
        .redistribute(r"layers\.\d+.<out>", P, S1, "tp")
        .shard("<in>", S0, "dp")
    )


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects the rows of the tree as text."""

    def __init__(self, path):
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open, self.rows, self.addresses, self.scripts = [], [], [], 0
        self.elements = []
        self.feed(self.text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self.addresses += [attributes[name] for name in ("src", "href") if name in attributes]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append((tag, "row" in (attributes.get("class") or "").split()))
        if self.open[-1][1]:
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if any(row for _, row in self.open) and data.strip():
            self.rows[-1].append(data.strip())

    def row(self, *begin):
        return next(row for row in self.rows if row[: len(begin)] == list(begin))


def stack(number):
    model = nn.Module()
    model.layers = nn.ModuleList()
    for _ in range(number):
        block = nn.Module()
        block.up, block.down = nn.Linear(4, 8), nn.Linear(8, 4)
        model.layers.append(block)
    return model


def test_rows_have_placements_shapes_bytes_and_lines(mesh, model, tmp_path):
    page = Page(view(plan_of(mesh), model, tmp_path / "plan.html"))
    weight = page.row("weight", "float32")
    assert weight[2:6] == ["R", "S(0)", "(8, 4) → (4, 4)", "64 B"]
    assert re.fullmatch(r"test_view\.py:\d+", weight[6])
    assert page.row("scale")[1:5] == ["buffer float32", "R", "R", "(4)"]
    assert page.row("<out>:0")[1:-1] == ["redist", "P", "→", "S(1)"]
    assert page.row("<in>:0")[1:-1] == ["redist", "→", "S(0)"]


def test_a_tied_weight_is_named_and_counted_once(mesh, model, tmp_path):
    page = Page(view(plan_of(mesh), model, tmp_path / "plan.html"))
    tied = page.row("weight", "float32 = layers.0.up.weight")
    assert tied[2:5] == ["R", "S(0)", "(8, 4) → (4, 4)"]
    tensors = list(build_tree(plan_of(mesh), model, None).all_tensors)
    assert len(tensors) == len(list(model.parameters())) + len(list(model.buffers()))


def test_a_weight_is_shown_in_the_phase_of_the_optimizer_before_and_after(mesh, model):
    """ZeRO-1 beside tensor parallelism: the optimizer's shards, with the lines of both entries."""
    plan = plan_of(mesh).shard(r"layers\.1\.up\.weight", S0, "dp", plan_api.Phase.OPTIM)

    def shown():
        (layers,) = build_tree(plan, model, None).children
        block = next(one for one in layers.children if one.paths == ("layers.1",))
        up = next(one for one in block.children if one.name == "up")
        return next(one for one in up.tensors if one.name == "weight")

    before = shown()
    assert before.local_shape == (2, 4)
    assert len(before.lines) == 2
    parallelize(model, plan, src_data_rank=None)
    assert shown() == before


def test_equal_layers_are_one_row(mesh, tmp_path):
    with torch.device("meta"):
        model = stack(80)
    model.layers[40].up.bias = None
    plan = plan_of(mesh)
    plan._entries.pop()
    page = Page(view(plan, model, tmp_path / "plan.html"))
    assert page.row("0 … 39")[1] == "40 equal"
    assert page.row("41 … 79")[1] == "39 equal"
    assert "40" in [row[0] for row in page.rows]
    assert [row[0] for row in page.rows].count("up") == 3
    # 80 blocks of 32 + 8 + 32 sharded numbers and 4 replicated ones, less the missing bias.
    assert page.row("layers")[-1] == format_bytes(4 * (80 * (16 + 4 + 16 + 4) - 4))
    assert len(page.text) < 30_000


def test_layers_with_other_placements_are_separate_rows(mesh, tmp_path):
    plan = plan_of(mesh)
    plan._entries.pop()
    plan.shard(r"layers\.1\.up\.bias", R, "tp")
    page = Page(view(plan, stack(3), tmp_path / "plan.html"))
    assert "equal" not in str(page.rows)


def test_it_is_the_same_before_and_after_parallelize(mesh, model, tmp_path):
    plan = plan_of(mesh)
    before = view(plan, model, tmp_path / "plan.html").read_text(encoding="utf-8")
    parallelize(model, plan)
    assert view(plan, model, tmp_path / "again.html").read_text(encoding="utf-8") == before


def test_placements_of_other_packages_have_shapes(mesh, tmp_path):
    ragged = pytest.importorskip("ragged_shard", reason="an extra of plan-api")
    model = nn.Linear(4, 12, bias=False)
    for placement, rows in (
        (ragged.InterleavedShard(0, 3), 6),
        (ragged.RaggedShard((0,), (1, 2)), 4),
    ):
        plan = Plan(mesh).shard("weight", placement, "tp")
        page = Page(view(plan, model, tmp_path / "plan.html"))
        assert f"(12, 4) → ({rows}, 4)" in page.row("weight")
        assert plan.explain(model).rows[0].bytes == str(rows * 4 * 4)


def test_communication_includes_children(mesh, model, tmp_path):
    plan = plan_of(mesh)
    parallelize(model, plan)
    with track(model) as record:
        model.layers[0](torch.ones(2, 4))
        model.layers[1](torch.ones(2, 4))
    sent = [one for one in record.collectives if one.site is not None]
    tree = build_tree(plan, model, record)
    assert tree.total == Communication(len(sent), sum(one.bytes for one in sent))
    assert tree.own == Communication()
    assert tree.total.number >= 2
    page = Page(view(plan, model, tmp_path / "plan.html", record=record))
    assert f"{len(sent)} · {format_bytes(tree.total.bytes)}" in page.row("layers")


def test_communication_outside_of_modules_is_reported(mesh, model, tmp_path):
    record = Record("Model")
    together = CollectiveEvent(
        "all_reduce", None, StepPhase.BACKWARD, "dp", 2, "", "", 5000, "gradients", "", 0.0, 1.0
    )
    record._set((together,), ())
    text = view(plan_of(mesh), model, tmp_path / "plan.html", record=record).read_text("utf-8")
    assert "1 collectives, 4.9 KiB on rank 0; 1 of them, 4.9 KiB, belong to no module" in text


def test_the_page_fetches_nothing_and_escapes_names(mesh, tmp_path):
    evil = "<img src=http://a.example onerror=alert(1)>&\"'"
    model = nn.Module()
    model.add_module(evil.replace(".", "_"), nn.Linear(4, 4))
    page = Page(view(Plan(mesh), model, tmp_path / "plan.html"))
    assert page.row(evil.replace(".", "_"), "Linear")
    assert page.addresses == []
    assert page.scripts == 1
    assert "default-src 'none'" in html.unescape(page.text)
    assert "<img" not in page.text


def test_elements_escape_text_and_attributes():
    assert element("b", "<i>", element("i", "&"), title='"') == (
        '<b title="&quot;">&lt;i&gt;<i>&amp;</i></b>'
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (2**20, "1.0 MiB"), (2**41, "2,048.0 GiB")],
)
def test_bytes_are_formatted_with_units(number, text):
    assert format_bytes(number) == text


def luminance(colour):
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("placed", ["R", "P", "P(avg)", "S(0)", "S(1)", "S(2)", "S(3)", "Ragged"])
def test_text_has_enough_contrast_on_every_colour(placed):
    """Web Content Accessibility Guidelines 2.1, 1.4.3: a contrast of 4.5."""
    back, text = luminance(placement_colour(placed)), luminance("#14171c")
    assert (back + 0.05) / (text + 0.05) >= 4.5
    assert (placement_colour(placed) in DIM_COLOURS) == placed.startswith("S(")


def css_of(page):
    return re.search("<style>(.*?)</style>", page.text, re.DOTALL)[1]


def test_what_can_be_used_is_reached_by_tab_and_has_a_name(mesh, model, tmp_path):
    page = Page(view(plan_of(mesh), model, tmp_path / "plan.html"))
    used = [(tag, own) for tag, own in page.elements if tag in ("button", "input", "summary")]
    tags = [tag for tag, _ in page.elements]
    assert tags.count("summary") == tags.count("details") > 1
    assert all("tabindex" not in own for _, own in used)  # the browser's own order
    assert all("aria-label" in own for tag, own in used if tag == "input")
    named = {own["role"]: own for _, own in page.elements if "role" in own}
    assert named.keys() == {"img", "region", "search", "status"}
    assert named["region"]["tabindex"] == "0"
    assert "aria-label" in named["region"]
    shares = [own for _, own in page.elements if own.get("role") == "img"]
    assert {own["aria-label"] for own in shares} >= {"dp: R 100%"}
    assert ":focus-visible { outline: 2px solid var(--focus)" in css_of(page)


def test_on_paper_the_page_is_light_and_not_cut_off(mesh, model, tmp_path):
    css = css_of(Page(view(plan_of(mesh), model, tmp_path / "plan.html")))
    assert re.findall(r"@media (.*) \{", css) == [
        "screen and (prefers-color-scheme: dark)",
        "print",
    ]
    printed = css.partition("@media print {")[2]
    for rule in (
        ".bar { display: none; }",
        ".scroll { overflow: visible; }",
        ".tree { min-width: 0 !important; }",
        ".row, tr { break-inside: avoid; }",
    ):
        assert rule in printed
    assert "print-color-adjust: exact" in printed


def test_text_and_focus_have_enough_contrast_in_light_and_dark(mesh, model, tmp_path):
    css = css_of(Page(view(plan_of(mesh), model, tmp_path / "plan.html")))
    themes = re.findall(r":root \{(.*?)\}", css)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--(\w+): (#\w+)", theme))
        full = {
            name: "#" + "".join(2 * one for one in text[1:]) if len(text) == 4 else text
            for name, text in colours.items()
        }
        for back in ("back", "over", "found"):
            for text in ("text", "soft", "focus"):
                low, high = sorted(luminance(full[name]) for name in (back, text))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (back, text)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
PROBE = Path(__file__).with_name("view_probe.js").read_text(encoding="utf-8")


def browse(path, tmp_path, *, ask="", width=1400, dark=False):
    """Returns what a probe finds on the page in a headless Chromium."""
    probed = tmp_path / "probed.html"
    text = path.read_text(encoding="utf-8").replace("</body>", f"<script>{PROBE}</script></body>")
    probed.write_text(text, encoding="utf-8")
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'browser'}", f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", f"{probed.as_uri()}#{ask}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(html.unescape(re.search('data-found="([^"]*)"', done.stdout)[1]))


@pytest.fixture
def page(mesh, tmp_path):
    model, plan = stack(12), plan_of(mesh)
    plan._entries.pop()
    record = Record("Module")
    sent = [
        CollectiveEvent(
            "all_gather", f"layers.{n}", StepPhase.FORWARD, "tp", 2, "R,S(1)", "R,R", 123_456_789,
            "plan", "test_view.py:1", float(n), 1.0,
        )
        for n in range(12)
    ]  # fmt: skip
    record._set(tuple(sent), ())
    return view(plan, model, tmp_path / "plan.html", record=record)


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_it_without_overlaps(page, tmp_path, dark):
    found = browse(page, tmp_path, ask="weight", dark=dark)
    assert found["rows"] == 1 + 1 + 1 + 1 + 2 + 2 * 3  # with the header; one block of twelve
    assert (found["clipped"], found["overlapping"], found["outside"]) == ([], [], 0)
    assert (found["text"] > 128) == dark
    assert found["chip"] < 64
    assert found["loaded"] == 0


@in_a_browser
def test_keys_go_through_the_tree_and_focus_is_visible(page, tmp_path):
    keys = browse(page, tmp_path)["keys"]
    assert [(name, at, branch) for name, at, branch, _ in keys] == [
        ("ArrowDown", "layers", "open"),
        ("ArrowDown", "layers.0", "closed"),
        ("ArrowRight", "layers.0", "open"),
        ("ArrowRight", "layers.0.up", "closed"),
        ("End", "layers.0.down", "closed"),
        ("ArrowLeft", "layers.0", "open"),
        ("ArrowLeft", "layers.0", "closed"),
        ("ArrowUp", "layers", "open"),
        ("Home", "", "open"),
        ("ArrowUp", "", "open"),
    ]
    assert {outline for *_, outline in keys} == {"solid"}


@in_a_browser
def test_a_narrow_window_scrolls(page, tmp_path):
    found = browse(page, tmp_path, ask="weight", width=600)
    assert (found["clipped"], found["overlapping"], found["outside"]) == ([], [], 0)


@in_a_browser
def test_a_search_finds_and_opens_rows_of_equal_layers(page, tmp_path):
    found = browse(page, tmp_path, ask="layers.7.up.weight")
    assert found["found"] == ["layers.0.up.weight"]
    assert found["open"] == ["", "layers", "layers.0", "layers.0.up"]
    assert browse(page, tmp_path, ask="layers.12.up")["found"] == []
    assert browse(page, tmp_path)["open"] == ["", "layers"]
