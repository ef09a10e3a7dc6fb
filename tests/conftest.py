"""Profiles and markers: `multigpu` and `slow` tests run only if -m names them."""

import gc
import os
import tempfile

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support import pool

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_maps = tempfile.TemporaryDirectory()  # so that no test uses a map of an earlier run
os.environ.setdefault("MCORE_BRIDGE_CACHE", _maps.name)

settings.register_profile(
    "ci",
    deadline=None,
    max_examples=60,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking an example that builds models takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "search", parent=settings.get_profile("ci"), max_examples=1000, derandomize=False, phases=list(Phase)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    """Add the options of the tests on GPUs."""
    parser.addoption("--record", metavar="FILE", help="append what passed on GPUs, for docs/reference/support.md")
    parser.addoption("--families", metavar="NAMES", help="only these, with commas, where a test is of all families")
    parser.addoption("--meshes", metavar="NAMES", help="only these, as test_gpu_training prints them, with commas")
    parser.addoption("--ranks-per-gpu", type=int, default=1, metavar="N", help="where there are fewer GPUs than ranks")


def pytest_configure(config):
    """On CPU megatron-core's fused functions run as Python, since compiling them takes long."""
    os.environ["RANKS_PER_GPU"] = str(config.getoption("--ranks-per-gpu"))  # of ``gpus.py``, and its processes
    if "multigpu" not in config.getoption("-m"):
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def pytest_collection_modifyitems(config, items):
    """Deselect the tiers that were not requested. In the whole suite, mix files with and without processes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        _mix(items)
    asked = config.getoption("-m")
    for tier in ("multigpu", "slow"):
        if tier not in asked:
            for item in items:
                if tier in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=f"run with -m {tier}"))


def _mix(items):
    """Spread the files that run in the pool evenly among the others, since they wait for each other.

    The short files of trainers come last: after a long one at the end, other processes would have nothing to do.
    """
    files = sorted(dict.fromkeys(item.module for item in items), key=lambda file: ".trainers." in file.__name__)
    kinds = [[file for file in files if hasattr(file, "pool") is in_pool] for in_pool in (True, False)]
    places = {file: (number + 0.5) / len(kind) for kind in kinds for number, file in enumerate(kind)}
    items.sort(key=lambda item: places[item.module])


def pytest_collection_finish():
    """Later garbage collections leave out modules and tests: searching them took an eighth of the whole time.

    The workers of the pool are forked from this process as it is now.
    """
    gc.collect()
    gc.freeze()
    pool.fork_server()


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """After the tests of a file, garbage collections leave out its imports, too."""
    yield
    gc.collect()
    gc.freeze()
