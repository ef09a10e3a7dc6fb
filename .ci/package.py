"""Build the wheel and the sdist, install each in a clean environment, and use it there.

    python .ci/package.py [--extras]

The environment sees the libraries of this interpreter's environment, but not our checkout. Nothing is downloaded, so it
takes some seconds, and needs no network. With ``--extras`` pip also has to find releases for every extra; this needs
a network. ``te`` is left out: pip would have to compile it to know what it needs.
"""

from __future__ import annotations

import os
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
EXTRAS = ("cli", "real", "test", "site", "mutants", "dev")
INSIDE = """
import pathlib, sys
import mcore_bridge as mb
for name in mb.__all__:
    getattr(mb, name)
here = pathlib.Path(mb.__file__).parent
assert here.is_relative_to(sys.prefix), here
assert (here / "py.typed").is_file()
"""


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
    for archive in (wheel, rebuilt):
        use(archive)
    if "--extras" in sys.argv:
        for extra in EXTRAS:
            wanted = f"mcore-hf[{extra}] @ {wheel.as_uri()}"
            python(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", wanted)
    print(f"{wheel.name} and {sdist.name} install, and work")


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


def use(archive: Path) -> None:
    """Install it beside the libraries of this environment, and run a command and an import from another folder."""
    clean = BUILD / "clean"
    venv.create(clean, clear=True, with_pip=False)
    (site,) = clean.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose own .pth files are not read
    target = ["--prefix", clean, "--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location"]
    python(sys.executable, "-m", "pip", "install", "--quiet", *target, archive)
    interpreter = clean / "bin" / "python"
    python(interpreter, "-c", INSIDE, cwd=BUILD)
    python(interpreter, clean / "bin" / "mcore-bridge", "doctor", cwd=BUILD)


def python(*command: str | Path, cwd: Path = ROOT) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{finished.stdout}{finished.stderr}")


if __name__ == "__main__":
    main()
