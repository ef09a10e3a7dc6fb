"""The first tour, ``docs/tour.ipynb``: its cells run, and print what is kept in the notebook."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.torchrun import forked

NOTEBOOK = Path(__file__).parent.parent.parent / "docs" / "tour.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def is_slow(cell: dict) -> bool:
    return "slow" in cell["metadata"].get("tags", ())


def code(cell: dict) -> str:
    return "".join(cell["source"])


def printed(cell: dict) -> list[str]:
    """The lines that the cell prints, without numbers, which differ between releases."""
    text = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    return [without_numbers(line) for line in text.splitlines()]


def without_numbers(line: str) -> str:
    return re.sub(r"[\d.]+(e-\d+)?", "N", line).rstrip()


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_cells_run_and_print_what_is_kept(slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells run a command, which takes longer than all others together. What commands print has other tests."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("COLUMNS", "80")
    cells = [cell for cell in CELLS if slow or not is_slow(cell)]
    script = tmp_path / "tour.py"
    script.write_text("\n".join([f"import os\nos.chdir({str(tmp_path)!r})", *map(code, cells)]))
    codes, said = forked(script, 1)
    assert codes == [0], said
    lines = {without_numbers(line) for line in said.splitlines()}
    assert all(cell["outputs"] for cell in CELLS if "print(" in code(cell))
    assert [line for cell in cells if not is_slow(cell) for line in printed(cell) if line not in lines] == []


def test_the_notebook_keeps_no_warnings_and_no_paths() -> None:
    text = NOTEBOOK.read_text()
    assert text.isascii()
    assert '"stderr"' not in text
    assert "/tmp" not in text
    assert "/home" not in text
