"""The page that ``plan_api.view`` writes of LLaMA's plan, as Chromium shows it."""

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from integration.gallery.picture import Picture, compressed

_WIDTH, _HEIGHT = 1400, 1000


def write_page(path: Path) -> Path:
    """Writes the page of a plan with tensor, sequence and data parallelism, and of one step."""
    from plan_api import parallelize, zoo
    from plan_api.inspect.track import track
    from plan_api.inspect.view import view
    from testkit import fake_mesh, models

    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        model = models.llama(num_attention_heads=8, num_key_value_heads=4)
        plan = zoo.llama(mesh, tp="tp", dp="dp", sp=True)
        parallelize(model, plan)
        ids = torch.zeros(4, 16, dtype=torch.int64)
        with track(model) as record:
            model(input_ids=ids, labels=ids).loss.backward()
        return view(plan, model, path, record=record)


def draw() -> bytes:
    """Takes a screenshot of the page.

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("plan_view: expected chromium or google-chrome; install one")
    with TemporaryDirectory() as folder:
        page, shot = write_page(Path(folder) / "plan.html"), Path(folder) / "plan.png"
        command = [
            browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={shot}",
            f"--window-size={_WIDTH},{_HEIGHT}", page.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return compressed(shot)


PICTURE = Picture("plan_view.png", draw)
