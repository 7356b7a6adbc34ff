"""How the command line writes shares and counts, the same in tables, sentences and pictures."""


def percent(share: float) -> str:
    """A share as a percentage that keeps almost nothing apart from nothing."""
    if 0 < share < 0.000005:
        return "<0.001 %"
    return f"{100 * share:.3f} %"


def rows(count: int) -> str:
    """The size of a block, ``"1 row"`` or ``"128 rows"``."""
    return f"{count:,} row{'' if count == 1 else 's'}"
