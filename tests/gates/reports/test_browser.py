"""The page in a headless Chromium: light and dark, phone and desk, on paper. Skipped where there is none."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gates import cli

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
    pytest.mark.slow,
]
SCHEMES = {"dark": 0, "light": 1}  # of Blink's preferredColorScheme
WIDTHS = (390, 1280)
# A frame has a viewport of exactly its width, and tells what overflows; the page itself runs no script.
PROBE = """<!DOCTYPE html><title>probe</title><iframe src="{name}" style="width:{width}px;height:2000px;border:0">
</iframe><script>addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const broken = [...page.images].filter(image => !image.naturalWidth).length;
  const style = page.defaultView.getComputedStyle(page.body);
  document.title = [root.scrollWidth, root.clientWidth, page.images.length, broken, style.backgroundColor].join("|");
}})</script>"""


@pytest.fixture(params=["finished", "failing"])
def page(request: pytest.FixtureRequest, made: Any, tmp_path: Path) -> Path:
    if request.param == "failing":
        made.edit_lines(made.run("full") / "metrics.jsonl", lambda lines: lines[9].update(loss=float("nan")))
        long = {"id": "x" * 200, "prompt": "<script>document.title='run'</script>" + "word " * 90 + "y" * 300}
        made.edit(made.evidence("08-validation"), lambda d: d["data"]["samples"][0].update(long))
    path = tmp_path / "page.html"
    assert cli.main(["report", "--workspace", str(made.root), "--output", str(path)]) == 0
    return path


def _chromium(folder: Path, *arguments: str) -> str:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=5000",
        *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    consoles = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    assert consoles == []
    return done.stdout.decode("utf-8")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_the_screen_without_errors(page: Path, tmp_path: Path, scheme: str, width: int) -> None:
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(name=page.name, width=width), encoding="utf-8")
    setting = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    text = _chromium(tmp_path, setting, "--dump-dom", probe.as_uri())
    found = re.search(r"<title>(\d+)\|(\d+)\|(\d+)\|(\d+)\|(.*?)</title>", text)
    assert found, text[:200]
    assert int(found[1]) == int(found[2]) == width
    assert (int(found[3]), int(found[4])) == (12, 0)
    assert found[5] == {"dark": "rgb(13, 17, 23)", "light": "rgb(255, 255, 255)"}[scheme]


def test_it_prints(page: Path, tmp_path: Path) -> None:
    pdf = tmp_path / "page.pdf"
    _chromium(tmp_path, f"--print-to-pdf={pdf}", page.as_uri())
    data = pdf.read_bytes()
    assert data.startswith(b"%PDF-") and len(re.findall(rb"/Type\s*/Page\b", data)) >= 3


def test_a_screenshot_is_not_blank(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "page.png"
    _chromium(tmp_path, f"--screenshot={shot}", "--window-size=1280,2000", page.as_uri())
    with Image.open(shot) as image:
        assert image.size == (1280, 2000) and len(image.convert("RGB").getcolors(2**24) or ()) > 50
