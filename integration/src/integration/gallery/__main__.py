"""``python -m integration.gallery``: draws the pictures of docs/gallery."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from integration.gallery.pictures import discover
from integration.report.command_output import ProgressBar, print_result


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
    parser.add_argument("--json", action="store_true", help="print the files as JSON")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(pictures))
    if unknown:
        parser.error(f"expected names of pictures, {', '.join(pictures)}; got {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.names or list(pictures)
    drawn = []
    with ProgressBar() as bar:
        for number, name in enumerate(names, 1):
            bar.begin(name, number, len(names))
            path = options.out / pictures[name].file
            size = path.write_bytes(pictures[name].draw())
            drawn.append({"name": name, "path": path, "bytes": size})
    pictures_drawn = "1 picture" if len(drawn) == 1 else f"{len(drawn)} pictures"
    sentence = f"drawn: {pictures_drawn} in {options.out}"
    print_result(sentence, {"pictures": drawn}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
