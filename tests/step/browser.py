"""A headless Chromium: opens a page, does what a reader would, and tells what it saw."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="CHROMIUM IS MISSING: the page was not tested in a browser (Debian: apt install chromium)"
)

CHROME_LINES = 143  # of a headless window that its page doesn't get

# Walks through everything with a presenter's keys, in both themes, and tells what a reader would stumble over.
WALK = """
<script>
const faults = [], footer = document.querySelector("footer").getBoundingClientRect();
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const below = [];
let largest = 0;
for (const theme of ["light", "dark"]) {
  setTheme(theme); press("Home");
  for (const op of film.ops) {
    const fault = text => faults.push(`${theme} ${op.number}: ${text}`);
    if (+document.body.dataset.op !== op.number) fault(`shows ${document.body.dataset.op}`);
    const joined = op.conjugate && !film.places.length ? 1 : 0;
    if (document.querySelectorAll("path.pair").length !== joined) fault("a stale path");
    if (document.querySelectorAll(".op.now").length !== 1) fault("marks");
    if (document.documentElement.scrollWidth > innerWidth) fault("sticks out sideways");
    const cards = [...document.querySelectorAll("#arrays .card, #about .card, header, #timeline")];
    const boxes = cards.map(node => node.getBoundingClientRect());
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
      const beside = a.left > b.right - 1 || b.left > a.right - 1, under = a.top > b.bottom - 1 || b.top > a.bottom - 1;
      if (!beside && !under) fault("overlap");
    }));
    const arrays = [...document.querySelectorAll("#arrays .card")].map(node => node.getBoundingClientRect());
    if (arrays.some(box => box.bottom > footer.top)) below.push(op.number);
    if (arrays[0].bottom > footer.top) fault("what it makes lies under the footer");
    for (const canvas of document.querySelectorAll("#arrays canvas"))
      if (canvas.getBoundingClientRect().right > innerWidth) fault("an array is cut off");
    for (const card of document.querySelectorAll("#arrays .card, #about .card"))
      if (card.scrollWidth > card.clientWidth + 1) fault("a card is too narrow for what it holds");
    if (document.querySelector("#verdict") || getComputedStyle($("value")).display !== "none") fault("something stale");
    if (document.querySelectorAll("dialog[open]").length) fault("an open dialog");
    if ($("chapter").value !== op.chapter || canvases.length === 0) fault("not drawn");
    if (canvases.some(each => !$("arrays").querySelector("canvas"))) fault("canvases of another operation");
    if (op.number === 1) largest = Math.max(...arrays.map(box => box.bottom)) / footer.top;
    press("PageDown");
  }
  for (const op of [...film.ops].reverse()) press("PageUp");
  if (+document.body.dataset.op !== 1) faults.push("PageUp doesn't go back to the first");
}
const told = Object.assign(document.createElement("pre"), {id: "result"});
const letters = parseFloat(getComputedStyle(document.body).fontSize);
told.textContent = JSON.stringify({faults, errors, below, largest, letters, height: innerHeight});
document.body.replaceChildren(told);
</script>
"""
ERRORS = (
    "<script>const errors = []; window.addEventListener('error', event => errors.push(String(event.message)));"
    "window.addEventListener('unhandledrejection', event => errors.push(String(event.reason)));"
    "console.error = console.warn = (...words) => errors.push(words.join(' '));</script>"
)


def chromium(tmp_path: Path, *arguments: str) -> str:
    """What Chromium prints. A profile of its own, nothing that wants the network."""
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --hide-scrollbars"
    ).split()
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def browse(tmp_path: Path, page: str, size: str = "1366,900", actions: str = "") -> dict[str, Any]:
    """Run the actions on a page and return what they saw."""
    path = tmp_path / "page.html"
    path.write_text(page.replace("<head>", f"<head>{ERRORS}", 1).replace("</body>", f"{actions}</body>", 1))
    document = chromium(tmp_path, f"--window-size={size}", "--virtual-time-budget=4000", "--dump-dom", path.as_uri())
    found = re.search(r'<pre id="result">(.*?)</pre>', document, re.DOTALL)
    assert found, document[:2000]
    return json.loads(html.unescape(found[1]))


def walk_page(tmp_path: Path, page: str, width: int, height: int) -> dict[str, Any]:
    """Walk through every operation in both themes, in a window that shows so much; what was found."""
    return browse(tmp_path, page, f"{width},{height + CHROME_LINES}", WALK)
