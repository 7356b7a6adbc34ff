"""``python -m integration.loc``: prints the table of lines of code."""

from rich.console import Console
from rich.table import Table

from integration.loc.table import loc_section


def main() -> None:
    """Prints a row per model and system."""
    section = loc_section()
    table = Table(*section.columns, box=None)
    for row in section.rows:
        table.add_row(*row.cells)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
