"""Whatever the page opens over itself fits into the window, in both themes, and closes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitp.step.page import page_of
from tests.step.browser import CHROME_LINES, browse, needs_chromium
from tests.step.films import film_of

SIZES = [(1024, 768), (1366, 768), (1920, 1080)]
OPEN_ALL = """
<script>
const faults = [];
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
window.open = () => null;  /* blocked, as browsers do */
const dialogs = {"?": "help", e: "code", k: "sliders", l: "layouts", g: "gallery", y: "own-text", m: "notes"};
for (const theme of ["light", "dark"]) {
  setTheme(theme);
  for (const [key, id] of Object.entries(dialogs)) {
    press(key);
    const dialog = document.getElementById(id), box = dialog.getBoundingClientRect();
    const fault = text => faults.push(`${theme} ${id} ${text}`), mayScroll = ["code", "help"].includes(id);
    if (!dialog.open) fault("doesn't open");
    if (box.left < 0 || box.right > innerWidth || box.top < 0 || box.bottom > innerHeight) fault("sticks out");
    if (dialog.scrollWidth > dialog.clientWidth + 1) fault("is too narrow");
    if (!mayScroll && dialog.scrollHeight > dialog.clientHeight + 1) fault("has to be scrolled");
    for (const node of dialog.querySelectorAll("canvas, svg, button, select, input"))
      if (node.getBoundingClientRect().right > box.right) fault(`: ${node.tagName} is cut off`);
    const colour = getComputedStyle(dialog).color, ground = getComputedStyle(dialog).backgroundColor;
    if (colour === ground) fault("can't be read");
    dialog.querySelector(".close").click();
    if (document.querySelectorAll("dialog[open]").length) fault("doesn't close");
  }
}
const told = Object.assign(document.createElement("pre"), {id: "result"});
told.textContent = JSON.stringify({faults, errors, height: innerHeight});
document.body.replaceChildren(told);
</script>
"""


@needs_chromium
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_what_opens_fits(tmp_path: Path, width: int, height: int) -> None:
    found = browse(tmp_path, page_of(film_of()), f"{width},{height + CHROME_LINES}", OPEN_ALL)
    assert found["height"] == height and found["errors"] == [] and found["faults"] == []
