"""Reads a package's CHANGELOG.md: what is new in a version, in Keep a Changelog's form."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Notes", "notes"]

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


@dataclass(frozen=True)
class Notes:
    """What is new in a version.

    Attributes:
        text: Markdown, from the first kind of change on.
        date: of the release; None: still under Unreleased.
    """

    text: str
    date: datetime.date | None


def notes(changelog: Path, version: str) -> Notes:
    """What the changelog says of a version, or of what is not released yet if it has none.

    Raises:
        ValueError: neither says anything, a version is not dated, a kind of change is none of
            Keep a Changelog's or empty, or there is more under Unreleased though the version is
            dated.
    """
    _, *parts = re.split(r"^## ", changelog.read_text(), flags=re.MULTILINE)
    sections = {}
    for part in parts:
        heading, _, text = part.partition("\n")
        found = re.fullmatch(r"\[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?\s*", heading)
        if found is None or (found[1] == "Unreleased") != (found[2] is None):
            raise ValueError(
                f"{changelog}: the heading {heading!r}; expected [Unreleased], or "
                "[x.y.z] - YYYY-MM-DD"
            )
        date = datetime.date.fromisoformat(found[2]) if found[2] else None
        sections[found[1]] = Notes(_checked(changelog, found[1], text), date)
    waiting = sections.get("Unreleased", Notes("", None))
    if version in sections and waiting.text:
        raise ValueError(
            f"{changelog}: {version} is released, and more is under Unreleased; raise the version"
        )
    chosen = sections.get(version, waiting)
    if not chosen.text:
        raise ValueError(f"{changelog}: says nothing of {version}, nor under Unreleased")
    return chosen


def _checked(changelog: Path, version: str, text: str) -> str:
    before, *kinds = re.split(r"^### ", text, flags=re.MULTILINE)
    if before.strip():
        raise ValueError(
            f"{changelog}: {version} has text above its first kind of change: "
            f"{before.strip().splitlines()[0]!r}"
        )
    for each in kinds:
        kind, _, entries = each.partition("\n")
        if kind.strip() not in KINDS or not entries.strip():
            raise ValueError(
                f"{changelog}: {version} has {kind.strip()!r} with {len(entries.split())} words; "
                f"expected some, under one of {', '.join(KINDS)}"
            )
    return text.strip()
