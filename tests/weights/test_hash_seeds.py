"""Ranks plan alike though each hashes strings otherwise, as processes do that were started one by one.

Those of ``pool.py`` come from one process and hash as it does, so none of its tests can see what hangs on that.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SEEDS = range(2)
PLANS = """
import zlib
from tests.support import fake_mesh
from tests.support import target_models
from tests.support.strategies import random_state

hf = target_models.SPARSE
for dims in (dims for dims in target_models.GRID if dims.pp == 2 and dims.vp == dims.etp == 1):
    held = target_models.held_by(hf, dims, random_state(hf))
    for bucket_bytes in (1 << 12, 1 << 15, 1 << 18):
        plans = [fake_mesh.plan_of(held, bucket_bytes=bucket_bytes)]
        for ranks in target_models.assignments():
            targets = [ranks[rank % len(ranks)] for rank in range(len(held))]
            plans += [program.plan for program in fake_mesh.programs_for(held, targets, bucket_bytes=bucket_bytes)]
        for plan in plans:
            said = [plan.streams, plan.messages, plan.payload.outputs]
            print(dims, bucket_bytes, zlib.crc32(repr(said).encode()))
"""


def test_plans_are_those_of_any_process():
    def said(seed):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        done = subprocess.run([sys.executable, "-c", PLANS], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, *others = map(said, SEEDS)
    assert len(first) > 100
    assert all(other == first for other in others)
