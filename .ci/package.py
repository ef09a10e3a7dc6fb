"""Build the wheel and the sdist, install each in a clean environment, and use it there.

    python .ci/package.py [--extras] [--release]

The environment sees the libraries of this interpreter's environment, but not our checkout. Nothing is downloaded, so it
takes some seconds, and needs no network. With ``--extras`` pip also has to find releases for every extra; this needs
a network. ``te`` is left out: pip would have to compile it to know what it needs. With ``--release`` the checks of PyPI
follow, and everything is named that keeps this commit from being a release.
"""

from __future__ import annotations

import email.message
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "package"
EXTRAS = ("cli", "real", "test", "site", "mutants", "dev", "release")
INSIDE = """
import pathlib, sys
import mcore_bridge as mb
for name in mb.__all__:
    getattr(mb, name)
here = pathlib.Path(mb.__file__).parent
assert here.is_relative_to(sys.prefix), here
assert (here / "py.typed").is_file()
assert mb.__version__ == {version!r}, mb.__version__
"""
RELATIVE = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
"""A link to a file, which PyPI does not have."""


def main() -> None:
    """Raises if anything is missing, or if a command fails."""
    shutil.rmtree(BUILD, ignore_errors=True)
    dist, again = BUILD / "dist", BUILD / "again"
    python(sys.executable, "-m", "hatchling", "build", "--directory", dist)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(again, filter="data")
    (unpacked,) = again.iterdir()
    python(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", again, cwd=unpacked)
    (rebuilt,) = again.glob("*.whl")
    check_files(wheel, rebuilt)
    metadata = metadata_of(wheel)
    if metadata_of(rebuilt).as_string() != metadata.as_string():
        sys.exit("a wheel from the sdist must have the metadata of a wheel from the checkout, but differs")
    if links := RELATIVE.findall(str(metadata.get_payload())):
        sys.exit(f"README must have no relative link on PyPI, but has {links}")
    for archive in (wheel, rebuilt):
        use(archive, metadata["Version"])
    if "--extras" in sys.argv:
        for extra in EXTRAS:
            wanted = f"mcore-hf[{extra}] @ {wheel.as_uri()}"
            python(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", wanted)
    if "--release" in sys.argv:
        python(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        if problems := obstacles(metadata):
            sys.exit("this commit cannot be released: " + "; ".join(problems))
    print(f"{wheel.name} and {sdist.name} install, and work")


def metadata_of(wheel: Path) -> email.message.Message:
    """What pip and PyPI know of a wheel: its version, its addresses, and README as the payload."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(opened.read(name))


def obstacles(metadata: email.message.Message) -> list[str]:
    """Everything that a release must have and this commit lacks."""
    version, problems = metadata["Version"], []
    if not re.fullmatch(r"\d+(\.\d+)+((a|b|rc)\d+)?", version):
        problems.append(f"expected the version of a tag such as v0.1.0, found {version}: tag a commit without changes")
    if "/OWNER/" in metadata.as_string():
        problems.append("the owner of the repository is a placeholder: replace OWNER in pyproject.toml")
    if waiting := sorted(path.name for path in (ROOT / "changelog.d").glob("*.md")):
        number = re.match(r"[\d.]*\d", version)
        problems.append(
            f"{len(waiting)} changes are not in CHANGELOG.md: make changelog VERSION={number and number[0]}"
        )
    return problems


def check_files(wheel: Path, rebuilt: Path) -> None:
    """Both wheels have every file of the package, and no other."""
    tracked = subprocess.run(["git", "ls-files", "mcore_bridge"], cwd=ROOT, capture_output=True, text=True)
    names = tracked.stdout.split() or [str(path.relative_to(ROOT)) for path in (ROOT / "mcore_bridge").rglob("*.py")]
    for archive in (wheel, rebuilt):
        with zipfile.ZipFile(archive) as opened:
            packed = {name for name in opened.namelist() if ".dist-info/" not in name}
        missing, others = {*names, "mcore_bridge/py.typed"} - packed, packed - {*names}
        if missing or others:
            sys.exit(f"{archive} must have the files of git, but lacks {sorted(missing)} and has {sorted(others)}")


def use(archive: Path, version: str) -> None:
    """Install it beside the libraries of this environment, and run a command and an import from another folder."""
    clean = BUILD / "clean"
    venv.create(clean, clear=True, with_pip=False)
    (site,) = clean.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose own .pth files are not read
    target = ["--prefix", clean, "--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location"]
    python(sys.executable, "-m", "pip", "install", "--quiet", *target, archive)
    interpreter = clean / "bin" / "python"
    python(interpreter, "-c", INSIDE.format(version=version), cwd=BUILD)
    python(interpreter, clean / "bin" / "mcore-bridge", "doctor", cwd=BUILD)


def python(*command: str | Path, cwd: Path = ROOT) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{finished.stdout}{finished.stderr}")


if __name__ == "__main__":
    main()
