"""A step with LoRA, and an export of the base and of merged weights, beside the same of Megatron-Bridge.

    torchrun --nproc-per-node 1 benchmarks/adapters.py --site SITE "qwen3-8b" "qwen3-30b-a3b layers=12"
    torchrun --nproc-per-node 1 benchmarks/adapters.py --only ours --device cpu --tokens 64 "tiny-moe layers=1"

All linear layers of attention and MLP have adapters, with one A for each layer of megatron-core, and each expert has
its own: Megatron-Bridge's ``share_expert_adapters=False``. Weights and tokens are as in ``train.py``. The libraries are
measured in turns. SITE is as for ``peers.py``; Megatron-Bridge needs megatron-core 0.19.2. Each line of JSON is one
measurement, for a file in ``results``: a step (``tokens_s``), or an export that drops each tensor at the next one. Its
``extra_gb`` is GPU memory beside the model.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import case_arguments, config_of, from_the_first, parsed, report, set_up, summary
from export import leave_mesh
from libraries import MegatronBridge, Pairs
from steps import fill, free, text, timed_steps

import mcore_bridge as mb

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Adapted(NamedTuple):
    """A model with adapters, and how it is exported: merged, or the base alone."""

    model: Any
    export: Callable[[bool], Pairs]


def main() -> None:
    """Each case by each library, in turns."""
    parser = case_arguments(__doc__, "a model and its mesh, of one pipeline stage: 'qwen3-8b tp=2 sp=1'")
    parser.add_argument("--site", type=Path)
    parser.add_argument("--only", default=",".join(BUILDS), help="names of libraries")
    parser.add_argument("--tokens", type=int, default=4096, help="in a sequence")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    if "megatron_bridge" in arguments.only:
        if arguments.site is None:
            parser.error("megatron_bridge needs --site; --only ours goes without")
        sys.path.append(str(arguments.site / "megatron_bridge"))
    for case in arguments.cases:
        name, layers, sizes = parsed(case)
        set_up(Namespace(**sizes, device=arguments.device))
        with tempfile.TemporaryDirectory() as folder:
            config_of(name, layers).save_pretrained(folder)
            for turn in range(arguments.turns):
                for library in arguments.only.split(","):
                    adapted = BUILDS[library](Path(folder), sizes, arguments)
                    measure(adapted, arguments, case=case, library=library, turn=turn, rank=arguments.rank)
                    del adapted
                    free()
        leave_mesh()
    dist.destroy_process_group()


def measure(adapted: Adapted, arguments: Namespace, **fields: Any) -> None:
    """A report of each export, and of a step."""
    fill(adapted.model)
    trained = sum(parameter.numel() for parameter in adapted.model.parameters() if parameter.requires_grad)
    fields["trained_m"] = round(trained / 1e6, 3)
    for merged in (False, True):
        first, seconds, peak = from_the_first(lambda merged=merged: drain(adapted.export(merged)), arguments.repeats)
        num_bytes = sum(tensor.nbytes for _, tensor in adapted.export(merged))
        extra = {"first_s": round(first, 4), "extra_gb": round(peak / 1e9, 3)}
        report(**fields, measure="export", merged=merged, **summary(seconds, num_bytes), **extra)
    steps = timed_steps(adapted.model, text(arguments.tokens, arguments.device), arguments.tokens, arguments.repeats)
    report(**fields, measure="step", **steps)


def drain(pairs: Pairs) -> None:
    """Take every tensor, and keep none."""
    for _ in pairs:
        pass


def ours(folder: Path, sizes: dict[str, int], arguments: Namespace) -> Adapted:
    """By this library."""
    models = mb.build_model(
        folder,
        dims=mb.ParallelDims(**sizes),
        dtype=torch.bfloat16,
        device=arguments.device,
        backend=arguments.backend,
        load_weights=False,
    )
    rank = arguments.rank
    mb.add_adapters(models, rank=rank, alpha=2 * rank, targets=TARGETS, kind="shared", init="xavier")
    return Adapted(models[0], lambda merged: mb.iter_hf_weights(models, merged=merged))


def theirs(folder: Path, sizes: dict[str, int], arguments: Namespace) -> Adapted:
    """By Megatron-Bridge."""
    from megatron.bridge.peft.lora import LoRA

    library, rank = MegatronBridge(folder, sizes, arguments.device), arguments.rank
    adapters = LoRA(target_modules=[*TARGETS], dim=rank, alpha=2 * rank, share_expert_adapters=False)
    library.models = adapters(library.models)
    return Adapted(library.models[0], lambda merged: library.export(merge_adapter_weights=merged))


BUILDS: dict[str, Callable[[Path, dict[str, int], Namespace], Adapted]] = {"ours": ours, "megatron_bridge": theirs}


if __name__ == "__main__":
    main()
