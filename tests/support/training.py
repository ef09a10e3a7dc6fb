"""Steps of training on meshes, compared with transformers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from mcore_bridge import ParallelDims
from tests.support import pool, stepping, tiny
from tests.support.strategies import HASHES, on_disk
from tests.support.text_halves import published_names

LR = 0.3
MESHES_WITH_EXPERTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2, "layout": "balanced"}, {"ep": 2}],
    4: [
        {"tp": 4, "sp": True},
        {"tp": 2, "cp": 2, "sp": True},
        {"tp": 2, "sp": True, "pp": 2, "vp": 2},
        {"tp": 2, "etp": 2, "ep": 2, "sp": True},
    ],
}
"""For families with experts, whose layers differ so that stages of equal size need a layout."""


@dataclass(frozen=True, eq=False)
class Kind:
    """Models that train on the same meshes.

    Args:
        models: configs by name.
        meshes: sizes of meshes, by the number of ranks.
        every: on each mesh, only one of this many models trains, in turn; on one rank all models train.
        fits: whether a model trains on a mesh; by default each does.
        num_sequences, seq_len: the batch, which is equal for all meshes. Each replica has it in two microbatches.
    """

    models: Mapping[str, PretrainedConfig]
    meshes: Mapping[int, Sequence[dict[str, Any]]]
    every: int = 1
    fits: Callable[[str, ParallelDims], bool] = lambda name, dims: True
    num_sequences: int = 8
    seq_len: int = tiny.SEQ_LEN

    def check(self, world_size: int, folder: Path, *, every: int | None = None) -> None:
        """Check that loss and every gradient equal transformers', and that a step of SGD leads to transformers'
        weights.

        Parameters without a gradient in transformers keep their bits: biases of routers, indexers, which only select,
        experts that no token selects, and integers of hashes.
        """
        every = every or (1 if world_size == 1 else self.every)
        folders = {name: str(tiny.random_checkpoint(hf, folder / name)) for name, hf in self.models.items()}
        jobs = []
        for turn, sizes in enumerate(self.meshes[world_size]):
            names = [name for name in self.models if self.fits(name, ParallelDims(**sizes))]
            chosen = names[turn % every :: every] or names
            jobs += [(sizes, {name: folders[name] for name in chosen})] if names else []
        batch = tiny.tokens(self.num_sequences, seq_len=self.seq_len)
        for results in zip(*pool.run(world_size, steps, jobs, batch, timeout=600), strict=True):
            tiny.assert_losses(results, expected(self, results[0][1])[0])
            for label, name, step in results:
                _, grads, weights = expected(self, name)
                held = published_names(self.models[name], dict(read_folder(Path(folders[name]))))
                assert grads.keys() <= step["grads"].keys() == held.keys(), label
                untrained = held.keys() - grads.keys()
                parts = (
                    *(".indexer.", ".self_attn.index_", *HASHES),
                    "e_score_correction_bias",
                    *(".expert_bias", ".router_bias", ".gate.bias", ".tid2eid"),
                    ".layer_scalar",
                    ".act_fn.",
                    ".experts.",
                )  # transformers 4 does not run experts without a token
                assert all(any(part in key for part in parts) for key in untrained), label
                assert all(step["weights"][key].equal(held[key]) for key in untrained), label
                for which, truth in (("grads", grads), ("weights", weights)):
                    tiny.assert_near(step[which], truth, f"{label}: {which}")


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in folder.glob("*.safetensors"):
        yield from load_file(file).items()


@cache
def expected(kind: Kind, name: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """transformers' loss, gradients and weights after a step of SGD, under the names on disk."""
    model = tiny.random_model(kind.models[name])
    _, loss, grads = tiny.reference(model, tiny.tokens(kind.num_sequences, seq_len=kind.seq_len))
    after = {key: p.detach() - LR * grads[key] for key, p in model.named_parameters() if key in grads}
    return loss, on_disk(model, grads), on_disk(model, after)


def steps(jobs: list[tuple[dict[str, Any], dict[str, str]]], batch: Tensor) -> list[Any]:
    """Runs in each worker: on each mesh a step of each checkpoint, with a label and its name."""
    found = []
    for sizes, folders in jobs:
        dims = ParallelDims(**sizes)
        micro_batch_size = max(1, len(batch) // dims.dp(dist.get_world_size()) // 2)
        with stepping.mesh(dims):
            for name, folder in folders.items():
                step = stepping.train(folder, dims, batch, lr=LR, micro_batch_size=micro_batch_size)
                found.append((f"{name} on {sizes}", name, step))
    return found


def recomputed(folder: str, options: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Runs in each worker: gradients for each way to recompute."""
    found, dims = [], ParallelDims(tp=2, sp=True)
    for overrides in options:
        with stepping.mesh(dims):
            found.append(stepping.train(folder, dims, tiny.tokens(2), overrides=overrides)["grads"])
    return found


WHOLE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def check_recompute(
    hf: PretrainedConfig, modules: list[str], folder: Path, *, whole: bool = True, exact: bool = True
) -> None:
    """Check that gradients keep their bits if these modules, or also ``whole`` layers, are recomputed.

    Without ``exact`` they may be rounded in another order: a recompute may change the strides that a norm sums over.
    """
    options: list[dict[str, Any]] = [
        {},
        *([WHOLE] if whole else []),
        {"recompute_granularity": "selective", "recompute_modules": modules},
    ]
    plain, *others = pool.run(2, recomputed, str(tiny.random_checkpoint(hf, folder)), options)[0]
    for grads in others:
        if exact:
            assert all(grads[name].equal(grad) for name, grad in plain.items())
        else:
            tiny.assert_near(grads, plain, str(modules))
