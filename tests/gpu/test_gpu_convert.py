"""Conversions on GPUs: every file has the bytes that a process without a GPU writes."""

import pytest
import torch

from mcore_bridge import ParallelDims
from mcore_bridge.convert.convert import convert
from mcore_bridge.convert.hf_to_torch import rank_files
from tests.support.conversions import quiet, small

pytestmark = pytest.mark.multigpu

FILES = rank_files("torch", ParallelDims(tp=2, ep=2), "te")
DIRECTIONS = {"to torch_dist": (False, None), "to torch": (False, FILES), "from torch_dist": (True, None)}
DIRECTIONS["from torch"] = (True, FILES)


def contents(folder):
    """The contents of a folder's files, except a number in ``.metadata`` that torch changes each time."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".metadata")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as it is", "cast"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gpus_write_the_same_bytes(direction, dtype, tmp_path):
    back, files = DIRECTIONS[direction]
    source, wanted = small(tmp_path / "hf"), {"file_bytes": 20_000, "dtype": dtype}
    if back:
        convert(source, tmp_path / "files", rank_files=files, on_event=quiet)
        source = tmp_path / "files"
    else:
        wanted["rank_files"] = files
    convert(source, tmp_path / "plain", on_event=quiet, **wanted)
    expected = contents(tmp_path / "plain")
    for count in range(1, min(2, torch.cuda.device_count()) + 1):
        seen = set()
        target = tmp_path / f"on {count}"
        on_event = lambda rank, *event, seen=seen: seen.add(rank)  # noqa: E731
        assert convert(source, target, num_gpus=count, on_event=on_event, **wanted).conversion.device == "cuda"
        assert contents(target) == expected
        assert seen == set(range(count))
