"""The documentation is true: generated tables, the text of examples, names of files."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import transformers

import mcore_bridge
from mcore_bridge import engines
from mcore_bridge.architecture import architectures, composites
from mcore_bridge.commands.doctor import MINIMUM, TESTED

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *(f"changelog.d/{path.name}" for path in sorted((ROOT / "changelog.d").glob("*.md"))),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 has no configs of some families")
def test_the_tables_of_families_are_those_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "tools")
    made = importlib.import_module("make_families").wanted()
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert not stale, "run: python docs/tools/make_families.py"
    for model_type in {**architectures(), **composites()}:
        assert f"`{model_type}`" in (ROOT / "docs/reference/families.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    home = ROOT if page.startswith("changelog.d/") else path.parent  # towncrier moves its text to CHANGELOG.md
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (home / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    for name in re.findall(
        r"`((?:mcore_bridge|tests|docs|examples|rules|config|weights|models|factory|launch|convert|trainers|commands)/[\w./]*)`",
        (ROOT / page).read_text(),
    ):
        assert (ROOT / name).exists() or (ROOT / "mcore_bridge" / name).exists(), name


def test_the_glossary_has_each_attribute_that_we_put_on_chunks() -> None:
    package = "\n".join(path.read_text() for path in (ROOT / "mcore_bridge").rglob("*.py"))
    _, table = (ROOT / "docs/internals/glossary.md").read_text().split("| attribute | what it is |")
    assert {*re.findall(r"(?m)^\| `(\w+)` \|", table)} == {
        *re.findall(r"\b(?:chunk|held)\.(bridge\w*|vision) = ", package)
    }


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_parse_and_use_public_names(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        names = {
            (node.value.id, node.attr)
            for node in ast.walk(ast.parse(block))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert {name for home, name in names if home == "mb"} <= set(mcore_bridge.__all__)
        assert {name for home, name in names if home == "engines"} <= set(engines.__all__)


def test_the_page_of_python_has_each_public_name_once() -> None:
    text = (ROOT / "docs/reference/api.md").read_text().partition("## Errors")[0]
    for home, part in zip((mcore_bridge, engines), text.split("## For authors of engines"), strict=True):
        listed = re.findall(r"(?m)^\.\. auto\w+:: (\w+)(?:\(\))?$", part)
        assert sorted(listed) == sorted({*home.__all__} - {"BridgeError"})


def test_the_family_on_its_page_is_a_file() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/add_a_family.md").read_text(), re.DOTALL)
    assert block == (ROOT / "mcore_bridge/models/qwen3.py").read_text()


def test_the_picture_shows_the_newest_figures() -> None:
    finished = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "picture.py"), "--check"])
    assert finished.returncode == 0


def test_the_commands_of_the_readme_exist() -> None:
    from mcore_bridge.commands.app import app

    known = {command.name for command in app.registered_commands}
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    assert set(re.findall(r"mcore-bridge (\w+)(?= path|`)", text)) == known
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (\w+)(?=[` ]|$)", text, re.MULTILINE))
    assert named & {"demo", "test", "check", "docs", "site", "mutants"} <= targets


def test_versions_are_said_once() -> None:
    """pyproject.toml, the package, the constraints, the doctor and the first pages agree."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert "version" in tomllib.loads(pyproject)["project"]["dynamic"]
    assert not re.search(r"(?m)^version:", (ROOT / "CITATION.cff").read_text())
    assert (ROOT / "mcore_bridge" / "py.typed").exists()
    for name in ("torch", "megatron-core", "transformers"):
        assert f'"{name}>={MINIMUM[name]}"' in pyproject
    assert f'requires-python = ">={MINIMUM["python"]}"' in pyproject
    first_pages = [(ROOT / page).read_text() for page in ("README.md", "docs/index.md", "docs/start.md")]
    pins = [(ROOT / "constraints" / name).read_text() for name in ("py311.txt", "py312.txt")]
    for name in ("torch", "megatron-core", "transformers"):
        found = [match[1] for text in pins if (match := re.search(rf"^{name}==([\d.]+)$", text, re.MULTILINE))]
        assert len(found) == 2
        for bound, version in zip(TESTED[name], sorted(found), strict=True):
            assert f"{version}.".startswith(f"{bound}."), (name, version)
            assert all(re.search(rf"\b{re.escape(bound)}\b", text) for text in first_pages), (name, bound)
    assert f"Programming Language :: Python :: {TESTED['python'][1]}" in pyproject
    newest = [(ROOT / "constraints" / name).read_text().splitlines() for name in ("py312-newest.txt", "py313.txt")]
    same = [[line for line in lines if not line.startswith("#")] for lines in newest]
    assert same[0] == same[1]


def test_a_folder_that_nobody_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    installed = importlib.metadata.version("mcore-hf")
    monkeypatch.delitem(vars(mcore_bridge), "__version__", raising=False)
    assert mcore_bridge.__version__ == installed
    monkeypatch.delitem(vars(mcore_bridge), "__version__")
    monkeypatch.setattr("importlib.metadata.version", absent)
    assert mcore_bridge.__version__ == "0+not.installed"
    del vars(mcore_bridge)["__version__"]


def test_the_address_stands_in_one_file() -> None:
    """The owner of the repository is said in pyproject.toml alone, and the same everywhere in it."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(pyproject)["project"]
    owner = project["urls"]["Repository"].split("/")[3]
    assert {*re.findall(r"git(?:hub|hubusercontent)\.com/(\w+)/mcore_bridge", pyproject)} == {owner}
    assert project["urls"]["Repository"] not in "".join((ROOT / page).read_text() for page in PAGES)
    assert all(f"- name: {author['name']}\n" in (ROOT / "CITATION.cff").read_text() for author in project["authors"])


def test_changes_have_the_names_that_towncrier_knows() -> None:
    """``changelog.d/+WORDS.SUBJECT.md``, or ``NUMBER.SUBJECT.md`` for an issue: a whole sentence, or several."""
    kinds = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    subjects = [kind["directory"] for kind in kinds]
    assert ", ".join(f"`{subject}`" for subject in subjects) in (ROOT / "CONTRIBUTING.md").read_text().replace(
        "\n", " "
    )
    for path in (ROOT / "changelog.d").glob("[!.]*"):
        assert re.fullmatch(rf"(\+[a-z0-9-]+|\d+)\.({'|'.join(subjects)})\.md", path.name), path.name
        assert re.search(r"[.:]\n\Z", path.read_text()), path.name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_loggers_are_those_of_their_page() -> None:
    package = {path: path.read_text() for path in (ROOT / "mcore_bridge").rglob("*.py")}
    names = {name for text in package.values() for name in re.findall(r'getLogger\("([\w.]+)"\)', text)}
    modules = {
        path.relative_to(ROOT).with_suffix("") for path, text in package.items() if "getLogger(__name__)" in text
    }
    listed = re.findall(r"(?m)^\| `(mcore_bridge[\w.]*)` \|", (ROOT / "docs/guide/logging.md").read_text())
    assert {*listed} == names | {".".join(module.parts) for module in modules}


def test_ascii_only() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.is_file():
            assert path.read_bytes().isascii(), name
