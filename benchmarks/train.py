"""Measures tokens per second of a forward and backward pass, for our model and Megatron-Bridge's.

    torchrun --nproc-per-node 1 benchmarks/train.py --site SITE "qwen3-8b" "qwen3-30b-a3b layers=12"
    torchrun --nproc-per-node 2 benchmarks/train.py --site SITE "qwen3-8b tp=2 sp=1"
    torchrun --nproc-per-node 1 benchmarks/train.py "deepseek_v4 layers=4 n_routed_experts=16" "qwen3-8b layers=4"

Without SITE our model is measured alone, which may be of any family. A report has the parameters that work on each
token (without embeddings), and floating-point operations by them: six for each parameter and token. So steps of models
of different sizes can be compared. Operations of attention between tokens are not counted.

The two models are built one after the other in one process, and wrapped in megatron-core's DDP. They get equal weights
and tokens, and are measured in turns. Each turn prints a report. The first report also lists the fields in which the
two configs differ. SITE is as for ``peers.py``. Further arguments `--ours name=value` override fields of our config, as
a trainer would.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import changed_fields, config_of, parsed, report
from libraries import MegatronBridge
from peer import join
from steps import fill, free, text, timed_steps

import mcore_bridge as mb


def main() -> None:
    """Each case by each library, in turns."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", help="a model and its mesh, of one pipeline stage: 'qwen3-8b tp=2 sp=1'")
    parser.add_argument("--site", type=Path)
    parser.add_argument("--tokens", type=int, default=4096, help="in a sequence")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=VALUE", help="VALUE is JSON")
    arguments = parser.parse_args()
    if arguments.site:
        sys.path.append(str(arguments.site / "megatron_bridge"))
    for case in arguments.cases:
        measure(case, arguments)
    dist.destroy_process_group()


def measure(case: str, arguments: Namespace) -> None:
    """Reports of all turns of a case."""
    from megatron.core import parallel_state

    name, layers, sizes = parsed(case)
    join(sizes, "cuda")
    overrides = {key: json.loads(value) for key, _, value in (each.partition("=") for each in arguments.ours)}
    with tempfile.TemporaryDirectory() as folder:
        config_of(name, layers, **changed_fields(case)).save_pretrained(folder)
        builds: dict[str, Callable[[], Any]] = {"ours": partial(_ours, folder, sizes, overrides)}
        if arguments.site:
            builds["megatron_bridge"] = lambda: MegatronBridge(Path(folder), sizes, "cuda").models[0]
        configs = {}
        for turn in range(arguments.turns):
            for library, build in builds.items():
                model = build()
                configs[library] = _plain(model.config)
                differing = _differing(configs) if turn == 0 and len(configs) == 2 else None
                fill(model)
                active = _active(model)
                steps = timed_steps(model, text(arguments.tokens, "cuda"), arguments.tokens, arguments.repeats)
                speed = {"active_b": round(active / 1e9, 3), "tflops": round(6 * active * steps["tokens_s"] / 1e12, 1)}
                report(case=case, library=library, turn=turn, differing=differing, **steps, **speed)
                del model
                free()
    parallel_state.destroy_model_parallel()


def _ours(folder: str, sizes: dict[str, int], overrides: dict[str, Any]) -> Any:
    dims = mb.ParallelDims(**sizes)
    (model,) = mb.build_model(folder, dims=dims, device="cuda", load_weights=False, overrides=overrides)
    return model


def _active(model: Any) -> float:
    """The parameters of this rank that work on each token, on average."""
    config = model.config
    share = config.moe_router_topk / config.num_moe_experts if config.num_moe_experts else 1
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if "embedding" not in name}
    return sum(size * (share if ".mlp.experts." in name else 1) for name, size in sizes.items())


def _plain(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}


def _differing(configs: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str]]:
    ours, theirs = (configs[library] for library in ("ours", "megatron_bridge"))
    both = [name for name in ours if name in theirs and not name.endswith("init_method") and ours[name] != theirs[name]]
    return {name: (str(ours[name]), str(theirs[name])) for name in both if not callable(ours[name])}


if __name__ == "__main__":
    main()
