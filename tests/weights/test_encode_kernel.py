"""The kernel that encodes shards on GPUs has the bits of the codec, and a wrong kernel would be found."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mcore_bridge

SOURCE = Path(mcore_bridge.__file__).parent / "weights" / "sent" / "triton_encode.py"
MISTAKES = {
    "": "",
    "exponent = (bits >> 23) - 8": "exponent = (bits >> 23) - 7",
    "= low | high << 4": "= high | low << 4",
    "stored = tl.where(differs > 0, stored, old)": "stored = old",
    "if shows == 0:": "if shows != 0:",
    "+ 0x7FFFF + ((bits >> 20) & 1)": "+ 0x7FFFF",
    "tl.load(places + codes_at + line": "tl.load(places + line",
    "tl.max(tl.abs(starts), axis=0) == 0": "tl.max(tl.abs(starts), axis=0) != 0",
}
"""Replacements in the source of the kernel; the first one changes nothing."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("right", MISTAKES)
def test_bits_are_those_of_the_codec_in_the_interpreter(right: str, tmp_path: Path) -> None:
    source = SOURCE.read_text()
    assert right in source
    (tmp_path / "kernel.py").write_text(source.replace(right, MISTAKES[right]))
    command = [sys.executable, "-m", "tests.workers.encode_kernel", str(tmp_path / "kernel.py")]
    ran = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ("AssertionError" in ran.stderr) == bool(right)
    assert (ran.returncode == 0) == (not right), ran.stderr[-2000:]
