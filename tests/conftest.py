"""Profiles and markers: `multigpu` and `slow` run only when they are asked for with -m."""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile(
    "ci", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", parent=settings.get_profile("ci"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(config, items):
    """Deselect the tiers that nobody asked for. With several jobs, one runs all that needs the pool of processes.

    Two pools would have more processes than most machines have cores, and collectives would wait for the scheduler.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            group = "processes" if hasattr(item.module, "pool") else item.module.__name__
            item.add_marker(pytest.mark.xdist_group(group))
    asked = config.getoption("-m")
    for tier in ("multigpu", "slow"):
        if tier not in asked:
            for item in items:
                if tier in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=f"run with -m {tier}"))
