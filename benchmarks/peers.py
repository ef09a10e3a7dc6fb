"""Times mcore_bridge and other published libraries, with one model, mesh, checkpoint and machine, in one run.

    python benchmarks/peers.py --site SITE --folder FOLDER "qwen3-8b tp=2 pp=2" "qwen3-30b-a3b layers=12 tp=2 ep=4 sp=1"
    python benchmarks/peers.py --folder FOLDER --device cpu --only ours "tiny tp=2 pp=2" "tiny-moe ep=4"

Each library runs in separate processes, one library after the other. If a library fails or takes too long, this is
reported, and the next begins. `--measure export=10,save=1` chooses what is measured and how often. An export gives
every HF tensor to every rank, which drops it at the next one. Before that, exported tensors are compared with the
checkpoint: the result is `exact` if all bits are equal, else `wrong` has the number of different tensors and the name
of one. A load is from a warm page cache, into a model that was loaded before. A save to a FOLDER in memory meets no
disk. Megatron-Bridge exports twice: as it does by default, and with its list of conversion tasks kept. OMP_NUM_THREADS
is 1, as torchrun sets it, unless it is set.

SITE has a folder for each library, also with small packages that the library imports and that may be missing. All of
them also need TransformerEngine, megatron-core 0.16 and transformers. Megatron-Bridge needs megatron-core 0.19.2, so it
needs a separate run, `--only ours,megatron_bridge`.

    install() { pip install --no-deps --target SITE/$1 "${@:2}"; }
    install mbridge mbridge==0.15.1
    install megatron_bridge megatron-bridge==0.6.2 omegaconf==2.3.0 hydra-core antlr4-python3-runtime==4.9.3 \
        rich markdown-it-py mdurl pygments
    install mcore_bridge mcore_bridge==1.6.5 peft==0.20.0

ModelScope's mcore_bridge imports `datasets`, `modelscope` and `PIL`, but does not use them to convert. If they are not
installed, empty modules replace them. mbridge gets the `rope_theta` that transformers 5 has moved. Megatron-Bridge is
built without the fused accumulation of gradients, and its save needs `modelopt`. Nothing else is changed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from libraries import LIBRARIES

HERE = Path(__file__).parent
REPEATS = {"load": 2, "export": 5, "save": 1}
FAILED = "failed: "  # begins the line with a rank's error, as JSON
LAST_LINES = 15


def main() -> None:
    """Every library for every case."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="+", help="a model and its mesh: 'qwen3-8b tp=2 pp=2', layers=N for fewer")
    parser.add_argument("--site", type=Path, help="with one folder for each library")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, which are made once and kept")
    parser.add_argument("--world", type=int, default=4, help="how many ranks")
    parser.add_argument("--only", default=",".join(LIBRARIES), help="names of libraries, ours among them")
    parser.add_argument("--measure", default="load,export,save", help="which, and how often: export=10,save")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one library and one case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args()
    for case in arguments.cases:
        for library in arguments.only.split(","):
            if library not in LIBRARIES:
                parser.error(f"--only takes names of {', '.join(LIBRARIES)}, found {library!r}")
            if library != "ours" and not arguments.site:
                parser.error(f"{library} needs --site")
            measure(library, case, arguments)


def measure(library: str, case: str, arguments: Namespace) -> None:
    """Run one library, and print its figures, and its error if it stopped."""
    options = ["--folder", arguments.folder, "--measure", counted(arguments.measure), "--device", arguments.device]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", arguments.world]
    command += ["--master-port", free_port(), HERE / "peer.py", library, case, *options]
    own = HERE.parent if library == "ours" else arguments.site / library
    path = os.pathsep.join(filter(None, [str(own.resolve()), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=err, env=environment)
        try:
            status = f"exit status {process.wait(arguments.limit)}"
        except subprocess.TimeoutExpired:
            status = f"not done in {arguments.limit:g} s"
        finally:
            end(process)
        out.seek(0)
        err.seek(0)
        lines = out.read().splitlines()
        print("\n".join(line for line in lines if line.startswith(("library ", '{"library"'))), flush=True)
        if process.returncode:
            why = [json.loads(line.removeprefix(FAILED)) for line in lines if line.startswith(FAILED)]
            ending = "\n".join((why[0] if why else err.read()).splitlines()[-LAST_LINES:])
            print(f"library {library}, case {case}: {status}\n{ending}")
            print(json.dumps({"library": library, "case": case, "status": status, "why": ending}), flush=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks. They are not in torchrun's process group, and torchrun ends them when it gets a
    signal.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(40)  # seconds; torchrun itself waits 30 before it kills
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def counted(measures: str) -> str:
    """``measures`` with a number each: "export=10,save" is "export=10,save=1"."""
    return ",".join(part if "=" in part else f"{part}={REPEATS[part]}" for part in measures.split(","))


def free_port() -> int:
    """A free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
