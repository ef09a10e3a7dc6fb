"""Ranks make equal plans although each has another hash seed, like processes that were started one by one.

Processes of ``pool.py`` are forked from one process and share its seed, so other tests cannot find such errors.
"""

import os
import subprocess
import sys
import zlib
from pathlib import Path

from tests.support import fake_mesh, target_models
from tests.support.strategies import random_state

ROOT = Path(__file__).parent.parent.parent
SAY = "from tests.weights.test_hash_seeds import plans\nprint(*plans(), sep='\\n')"


def plans():
    """Digests of the plans of exports and syncs to engines, on each mesh and with each size of buckets."""
    hf, found = target_models.SPARSE, []
    for dims in (dims for dims in target_models.GRID if dims.pp == 2 and dims.vp == dims.etp == 1):
        held = target_models.held_by(hf, dims, random_state(hf))
        for bucket_bytes in (1 << 12, 1 << 17):
            made = [fake_mesh.plan_of(held, bucket_bytes=bucket_bytes)]
            for ranks in target_models.assignments():
                targets = [ranks[rank % len(ranks)] for rank in range(len(held))]
                made += [each.plan for each in fake_mesh.programs_for(held, targets, bucket_bytes=bucket_bytes)]
            for plan in made:
                said = [plan.streams, plan.messages, plan.payload.outputs]
                found.append(f"{dims} {bucket_bytes} {zlib.crc32(repr(said).encode())}")
    return found


def test_plans_are_those_of_any_process():
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not the seed of this process
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", SAY], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own = plans()
    assert len(own) > 100
    assert done.stdout.splitlines() == own
