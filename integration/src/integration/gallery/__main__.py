"""``python -m integration.gallery``: draws the pictures of docs/gallery."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from integration.gallery.pictures import discover


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws the named pictures, or all, into a folder."""
    pictures = discover()
    parser = argparse.ArgumentParser(
        prog="python -m integration.gallery",
        description="Draws the pictures of the documentation.",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(pictures))
    parser.add_argument(
        "--out", type=Path, default=Path("docs/gallery"), help="folder of the files"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(pictures))
    if unknown:
        parser.error(f"expected names of pictures, {', '.join(pictures)}; got {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or pictures:
        path = options.out / pictures[name].file
        path.write_bytes(pictures[name].draw())
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
