"""Notebooks and pictures are what the scripts make now."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples import check

ROOT = Path(__file__).resolve().parents[2]
MAKER = runpy.run_path(str(ROOT / "scripts" / "make_notebooks.py"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
PICTURES = sorted((ROOT / "examples" / "pictures").glob("*.svg"))


def sources(notebook: dict) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def test_there_is_a_notebook_for_each_example() -> None:
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in MAKER["SCRIPTS"]]
    assert len(NOTEBOOKS) == 22


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_what_its_script_makes(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    script = ROOT / "examples" / f"{path.stem}.py"
    assert sources(notebook) == sources(MAKER["notebook_of"](script)), "run scripts/make_notebooks.py"
    code = [source for kind, source in sources(notebook) if kind == "code"]
    printed = MAKER["printed"](notebook)
    assert "WRONG" not in printed and ("EXERCISE" in printed or path.stem.startswith("your_own"))
    lines = [line.strip() for line in "\n".join(code).splitlines() if line.strip()]
    wanted = script.read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()
    wanted = [line.strip() for line in wanted if line.strip() and not line.startswith("if __name__")]
    start = lines.index(wanted[0])
    assert lines[start : start + len(wanted)] == wanted, "nothing of the script is lost"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_one_thing_a_cell_its_pictures_and_blanks_for_all_exercises(path: Path) -> None:
    cells = sources(json.loads(path.read_text(encoding="utf-8")))
    code = [source for kind, source in cells if kind == "code"]
    definitions = [re.findall(r"^(?:class|def) ", source, re.MULTILINE) for source in code]
    assert max(map(len, definitions)) == 1
    name = path.stem[:2] if path.stem[0].isdecimal() else path.stem
    blanks = [source for source in code if source.startswith("blank(")]
    assert len(blanks) == len(check.table()[name]) and all('"___"' in source for source in blanks)
    for _, source in cells:
        assert all((path.parent / link).is_file() for link in re.findall(r"\]\((\.\./[^)]+)\)", source))


def test_the_folder_that_jupyter_opens_holds_what_notebooks_show() -> None:
    """JupyterLab hands out no file from above it: pictures there would be empty frames."""
    command = (ROOT / "scripts" / "notebooks").read_text(encoding="utf-8")
    found = re.search(r"--notebook-dir=(\S+) --LabApp.default_url=/lab/tree/(\S+)", command)
    assert found is not None
    opened = ROOT / found[1]
    assert opened / found[2] == NOTEBOOKS[0].parent
    for path in NOTEBOOKS:
        for link in re.findall(r"\]\((\.\./[^)]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).resolve().is_relative_to(opened), (path.name, link)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("nbclient") or not find_spec("ipykernel"), reason="needs nbclient and ipykernel")
@pytest.mark.parametrize("path", [NOTEBOOKS[i] for i in (1, 11, 17)], ids=lambda path: path.stem)  # making runs all
def test_notebook_runs(path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_notebooks.py"), "--run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "EXERCISE" in done.stdout and "WRONG" not in done.stdout
    assert ("PROOF" in done.stdout) and "Traceback" not in done.stdout


@pytest.mark.parametrize("script", ["draw_pictures.py", "draw_moving.py"])
def test_pictures_show_what_the_code_does(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(PICTURES) == 5


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_picture_is_small_and_readable_on_dark_and_light(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert "prefers-color-scheme: dark" in text and re.search(r"<title>\w+", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
