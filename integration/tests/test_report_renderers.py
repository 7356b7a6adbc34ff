"""The renderers of a report, on reports that are made up here."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise

import pytest
from matplotlib.figure import Figure as MatplotlibFigure
from rich.console import Console

from integration.compare.variants import REFERENCE, SYSTEMS, VARIANT_NAMES
from integration.report.formatting import ABSENT, mebibytes
from integration.report.html import render_html
from integration.report.markdown import render_markdown
from integration.report.palette import DARK, LIGHT, style_of
from integration.report.section import (
    Cell,
    Column,
    Command,
    Figure,
    LogExcerpt,
    Paragraph,
    ReportPage,
    Section,
    Table,
    VerdictRow,
    anchor,
)
from integration.report.terminal import print_report, print_table
from integration.report.write import write_report

SOURCES = ("native", "dist-rng")


def drawn(theme):
    figure = MatplotlibFigure(facecolor=theme.background)
    figure.subplots().plot([1, 2], color=theme.ink)
    return figure


LOSSES = Table(
    columns=(
        Column("system", terminal="system"),
        Column("verdict", terminal="verdict"),
        Column("max |Δ|", is_number=True, terminal="max |Δ|"),
        Column("collectives of a step"),
    ),
    rows=(
        (Cell("single", series="single"), "reference", ABSENT, "none"),
        (
            Cell("ddp", series="ddp"),
            Cell("within tolerance", passes=True),
            "2e-5",
            "4 all_gather, 2 MiB; 1 reduce_scatter, 1 MiB",
        ),
        (Cell("fsdp", series="fsdp"), Cell("outside tolerance", passes=False), "0.5", "<none>"),
    ),
    title="llama",
)
FACTS = Table((Column(""), Column("")), (("torch", "2.14"), ("cores", "2")))
REPORT = ReportPage(
    title="Every system",
    subject="Trained & compared with `single`.",
    date="today",
    sections=(
        Section(
            "Speed, memory",
            (Paragraph("Within 1e-4."), Figure("losses", "Losses by step", drawn), LOSSES),
            (
                VerdictRow("llama", passes=False, largest="0.5", tolerance="1e-4", finding="No."),
                VerdictRow("dit", passes=True, largest="0", tolerance="1e-4", finding="Equal."),
                VerdictRow("deepspeed", passes=None, finding="It is missing."),
            ),
        ),
        Section(
            "Environment",
            (
                FACTS,
                Command("python -m x \\\n    --y"),
                LogExcerpt("Traceback: <broken> & gone"),
                Paragraph("Bit for bit.", is_note=True),
            ),
        ),
    ),
)


class Page(HTMLParser):
    """The open elements, the attributes of each element, and the text of the table rows."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.rows, self.order = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)
        if tag in ("table", "nav", "h2", "tr", "td"):
            self.order.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def values(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


@pytest.fixture(scope="module")
def page():
    return Page(render_html(REPORT))


def test_html_is_complete_and_loads_nothing(page):
    assert page.open == []
    images = [*page.values("src"), *page.values("srcset")]
    assert len(images) == len(set(images)) == 2
    assert all(each.startswith("data:image/svg+xml;base64,") for each in images)
    assert not re.search(r"https?://|@import|url\(|<script|<link", render_html(REPORT))


def test_html_begins_with_verdicts_and_a_contents_list(page):
    outline = [each for each in page.order if each in ("table", "nav", "h2")]
    assert outline == ["table", "nav", "h2", "table", "h2", "table"]
    assert page.rows[:2] == [
        ["compared", "verdict", "largest difference", "tolerance", "finding"],
        ["llama", "✗ does not pass", "0.5", "1e-4", "No."],
    ]
    assert page.rows[2][1] == "✓ passes"
    assert page.rows[3] == ["deepspeed", *[ABSENT] * 3, "It is missing."]


def test_links_of_html_lead_to_its_headings(page):
    headings = [attributes["id"] for tag, attributes in page.elements if tag == "h2"]
    assert headings == ["speed-memory", "environment"]
    assert page.values("href") == ["#speed-memory"] * 3 + ["#speed-memory", "#environment"]


def test_every_table_of_html_scrolls_within_its_card(page):
    before = [
        first[1].get("class") for first, second in pairwise(page.elements) if second[0] == "table"
    ]
    assert before == ["card"] * 3
    assert re.search(r"\.card \{[^}]*overflow-x: auto", render_html(REPORT))


def test_what_scrolls_is_reached_by_tab_and_has_a_name(page):
    regions = [own for _, own in page.elements if own.get("role") == "region"]
    assert [own["aria-label"] for own in regions] == ["Verdicts", "llama", "Environment"]
    assert [own["tabindex"] for own in regions] == ["0"] * 3
    assert page.values("scope") == ["col"] * 9
    assert ("nav", {"aria-label": "Contents"}) in page.elements
    assert re.search(r":focus-visible \{ outline: 2px solid var\(--focus\)", render_html(REPORT))


def test_on_paper_html_is_light_and_not_cut_off(page):
    dark, text = "screen and (prefers-color-scheme: dark)", render_html(REPORT)
    assert re.findall(r"@media (.*?) \{", text) == [dark, dark, "print"]
    assert page.values("media") == [dark]
    printed = text.partition("@media print {")[2]
    assert re.search(r"\.card \{[^}]*overflow: visible", printed)
    assert "th, td { white-space: normal;" in printed
    assert "tr, figure { break-inside: avoid; }" in printed


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_focus_of_html_have_enough_contrast(theme):
    rules = re.findall(r":root \{(.*?)\}", render_html(REPORT), re.DOTALL)
    assert len(rules) == 2
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", rules[theme]))
    pairs = [("page", "focus"), ("card", "focus"), ("good-soft", "good"), ("bad-soft", "bad")]
    pairs += [(back, text) for back in ("page", "card") for text in ("ink", "muted")]
    pairs += [("card", "good"), ("card", "bad")]
    for back, text in pairs:
        low, high = sorted(_luminance(colours[name]) for name in (back, text))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (back, text)


def test_html_shows_the_colour_of_a_system_on_both_backgrounds(page):
    chips = [style for style in page.values("style") if "--light" in style]
    assert chips == [
        f"--light: {style_of(name, LIGHT).colour}; --dark: {style_of(name, DARK).colour}"
        for name in ("single", "ddp", "fsdp")
    ]


def test_html_escapes_text_and_marks_code():
    text = render_html(REPORT)
    assert "Traceback: &lt;broken&gt; &amp; gone" in text
    assert "&lt;none&gt;" in text
    assert "Trained &amp; compared with <code>single</code>." in text


def test_a_table_without_headings_has_no_row_of_them(page):
    assert ["torch", "2.14"] in page.rows
    assert ["", ""] not in page.rows


def test_a_report_without_verdicts_has_no_table_of_them():
    report = replace(REPORT, sections=(Section("Only", (Paragraph("Text."),)),))
    assert "<table" not in render_html(report)
    assert "Passes" not in render_html(report)
    assert "Passes" not in render_markdown(report)
    assert report.passes


def test_a_report_passes_unless_a_verdict_failed():
    def passes(*verdicts):
        rows = tuple(VerdictRow("run", verdict) for verdict in verdicts)
        return ReportPage("report", (Section("one", (), rows),)).passes

    assert passes(True, None)
    assert not passes(True, False, None)


def test_markdown_begins_with_verdicts_and_a_contents_list():
    text = render_markdown(REPORT)
    lines = [line for line in text.splitlines() if line]
    assert lines[:3] == ["# Every system", "today", "**Does not pass.**"]
    assert lines[3:6] == [
        "| compared | verdict | largest difference | tolerance | finding |",
        "|---|---|---|---|---|",
        "| [llama](#speed-memory) | does not pass | 0.5 | 1e-4 | No. |",
    ]
    assert "- [Speed, memory](#speed-memory)\n- [Environment](#environment)" in text
    assert text.index("does not pass") < text.index("- [Speed") < text.index("## Speed, memory")


def test_markdown_shows_every_kind_of_content():
    text = render_markdown(REPORT)
    assert "![Losses by step](figures/losses.png)" in text
    assert "### llama\n\n| system | verdict | max \\|Δ\\| | collectives of a step |" in text
    assert f"|---|---|---:|---|\n| single | reference | {ABSENT} | none |" in text
    assert "```sh\npython -m x \\\n    --y\n```" in text
    assert "```text\nTraceback: <broken> & gone\n```" in text
    assert text.endswith("Bit for bit.\n")


def test_the_terminal_shows_short_tables_then_the_verdicts(tmp_path, capsys):
    print_report(REPORT, tmp_path / "report.html", Console(width=80, soft_wrap=True))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[:2] == ["llama", "system  verdict            max |Δ|"]
    assert lines[3] == "ddp     within tolerance      2e-5"
    assert [line.split()[0] for line in lines[5:9]] == ["compared", "llama", "dit", "deepspeed"]
    assert lines[9] == "DOES NOT PASS: No. Equal. It is missing."
    assert lines[10] == f"report: {tmp_path / 'report.html'}"
    assert len(lines) == 11


def test_the_terminal_breaks_long_texts_and_leaves_out_no_column(capsys):
    texts = (
        "a subject that is long enough to be broken",
        "it passes",
        "0.1 in step 3 of a long run",
    )
    columns = tuple(Column(name, terminal=name) for name in ("what", "verdict", "how much"))
    print_table(Table(columns, (texts,)), Console(width=60))
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split() == ["what", "verdict", "how", "much"]
    assert "it passes" in lines[1]
    for word in " ".join(texts).split():
        assert word in printed


def test_a_written_report_has_the_figures_that_it_names(tmp_path):
    html = write_report(REPORT, tmp_path)
    assert html.read_text() == render_html(REPORT)
    assert (tmp_path / "report.md").read_text() == render_markdown(REPORT)
    assert [each.name for each in (tmp_path / "figures").iterdir()] == ["losses.png"]
    assert (tmp_path / "figures" / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_are_in_mebibytes_unless_they_are_few():
    assert [mebibytes(count) for count in (8, 2**19, 5 * 2**20, 3000 * 2**20)] == [
        *("8 B", "0.5 MiB", "5 MiB", "3,000 MiB"),
    ]


def test_anchors_are_those_of_github():
    assert anchor("Speed, memory and collectives") == "speed-memory-and-collectives"
    assert anchor("plan-fsdp: 2 ranks") == "plan-fsdp-2-ranks"


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_no_two_systems_or_sources_look_alike(theme):
    names = [*VARIANT_NAMES, *SOURCES]
    styles = {name: style_of(name, theme) for name in names}
    assert len(set(styles.values())) == len(set(names))
    unknown = {style_of(f"new-{number}", theme) for number in range(200)}
    assert unknown.isdisjoint(styles.values())
    assert [name for name, style in styles.items() if style.colour == theme.reference] == [
        REFERENCE
    ]
    assert len(set(theme.series)) == len(theme.series)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_compared_systems_differ_in_colour_and_in_marker(theme):
    styles = [style_of(variant.name, theme) for variant in SYSTEMS]
    for first, second in combinations(styles, 2):
        assert first.colour != second.colour
        assert first.marker != second.marker


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_visible_on_their_background(theme):
    background = _luminance(theme.background)
    for colour in theme.series:
        low, high = sorted((_luminance(colour), background))
        assert (high + 0.05) / (low + 0.05) > 2.8


def _luminance(colour):
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
