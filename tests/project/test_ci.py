"""Workflows, image and dev container run what the Makefile and ``.ci/run`` have, and nothing else.

Whether GitHub accepts the workflows is what actionlint checks, on every commit (``.pre-commit-config.yaml``).
"""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {*re.findall(r"(?m)^([\w-]+):", MAKEFILE), *re.findall(r"\$\(VENV\)/(\.\w+): +EXTRAS", MAKEFILE)}
RUN = str(ROOT / ".ci" / "run")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_make_or_ci_run(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    lines = []
    for job in workflow["jobs"].values():
        assert job.keys() >= {"runs-on", "steps"}
        parts = job.get("strategy", {}).get("matrix", {}).get("part", [""])
        run = [step["run"] for step in job["steps"] if "run" in step]
        lines += [line.replace("${{ matrix.part }}", part) for line in run for part in parts]
    assert lines
    for line in lines:
        program, *arguments = line.split()
        assert program in ("make", ".ci/run"), line
        known = TARGETS if program == "make" else {"checks", "py311", "py312", "py313"}
        assert {word for word in arguments if "=" not in word} <= known, line


def test_the_parts_of_ci_run_are_checked() -> None:
    finished = subprocess.run([RUN, "py310"], capture_output=True, text=True)
    assert finished.returncode == 2
    assert "expected checks, py311, py312 or py313, found py310" in finished.stderr


def test_image_and_dev_container_install_what_there_is() -> None:
    image = (ROOT / "Dockerfile").read_text()
    assert {(ROOT / path).exists() for path in re.findall(r"--constraint (\S+)", image)} == {True}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*re.findall(r"'\.\[(\w+)\]'", image)} <= extras.keys()
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    program, *stamps = container["postCreateCommand"].split()
    assert program == "make"
    assert {stamp.removeprefix(".venv/") for stamp in stamps} <= TARGETS
