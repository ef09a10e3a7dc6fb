"""What all ranks must have in one order does not depend on the seed of a process for the hashes of strings.

The ranks of the other tests are forked from one process, so that they share this seed. Ranks of torchrun do not.
"""

import json
import os
import subprocess
import sys


def test_orders_of_names_do_not_depend_on_hashes():
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.ordered_names"]
    started = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE) for seed in "12"
    ]
    first, second = (json.loads(process.communicate(timeout=120)[0]) for process in started)
    assert first.keys() == second.keys()
    for name, names in first.items():
        assert names == second[name], name
