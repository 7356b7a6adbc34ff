"""The table of steps as a picture: bars of times, by case and by kind, as SVG."""

from xml.sax.saxutils import escape

# By the end of a row's keys that are times.
COLOURS = {
    "hand_ms": ("by hand, local tensors", "#9aa5b1"),
    "floor_ms": ("by hand, empty hooks", "#c3cad1"),
    "static_ms": ("static", "#2a7f62"),
    "generated_ms": ("static, generated plan", "#5aa88b"),
    "static_fused_comm_ms": ("static, fused-comm", "#7bc8a4"),
    "eager_ms": ("Eager, dtensor-rules", "#3b6ea8"),
    "cache_ms": ("rules, cache, in Python", "#d9a441"),
    "rules_ms": ("rules, in Python", "#a97bb5"),
    "native_ms": ("Eager, native DTensor", "#c8553d"),
}
LEFT, WIDTH, BAR, GAP = 230, 520, 15, 16


def bars(rows):
    """The SVG.

    Args:
        rows: of `static_speed`; each case has a scale of its own, whose end is its longest time.
    """
    parts, top = [], 64
    for at, (label, colour) in enumerate(COLOURS.values()):
        x, y = 10 + 180 * (at % 4), 12 + 20 * (at // 4)
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 17, y + 10, label))
    for row in rows:
        times = {key: row[key] for key in COLOURS if key in row}
        middle = top + len(times) * BAR / 2 + 4
        parts.append(_text(LEFT - 10, middle, row["case"], "end"))
        for key, value in times.items():
            length = WIDTH * value / max(times.values())
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR - 3}" '
                f'fill="{COLOURS[key][1]}"/>'
            )
            over = "" if key in ("hand_ms", "static_fused_comm_ms") else _over(row, value)
            parts.append(_text(LEFT + length + 6, top + BAR - 5, f"{value:.1f} ms{over}"))
            top += BAR
        top += GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 130}" height="{top}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _over(row, value):
    return f" ({value / row['hand_ms']:.2f} x)" if "hand_ms" in row else ""


def _text(x, y, text, anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
