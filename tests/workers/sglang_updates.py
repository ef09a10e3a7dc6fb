"""The calls by which a trainer passes its weights to SGLang's updater, and rounds of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.rules.spec import aligned
from tests.support.fusions import smallest_buckets
from tests.support.mapped import differences, forget
from tests.workers import sglang_engine


def update_by(updater: Any) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
    """A whole update of SGLang, with all tensors in one call."""

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        updater.begin_weight_update()
        updater.update_weights_from_tensor(list(pairs))
        updater.end_weight_update(run_post_load=False)

    return load


def at_once(updater: Any, models: Any) -> None:
    """All tensors in one call."""
    updater.update_weights_from_tensor(list(mb.iter_hf_weights(models)))


def in_buckets(updater: Any, models: Any) -> None:
    """A call for each bucket, of slots as small as the model allows."""
    for pairs, _, _ in received(smallest_buckets(mb.manifest(models)), models):
        updater.update_weights_from_tensor(pairs)


def flattened(updater: Any, models: Any) -> None:
    """A call for each slot as it lies there, in SGLang's own format of buckets."""
    manifest = mb.manifest(models)
    smallest = smallest_buckets(manifest).slot_bytes
    plan = mb.plan_buckets(manifest, slot_bytes=max(aligned(manifest.num_bytes) // 2, smallest))
    for _, slot, columns in received(plan, models):
        updater.update_weights_from_tensor(sglang_engine.bucket_of(slot, columns), "flattened_bucket")


WAYS: Sequence[Callable[[Any, Any], None]] = (at_once, in_buckets, flattened)


def received(plan: Any, models: Any) -> Iterator[tuple[list[tuple[str, Tensor]], Tensor, dict[str, Any]]]:
    """Yield the content of the slots of a ring: for each bucket its tensors, its slot, and the index of the slot."""
    with closing(mb.BufferRing(plan, "cpu")) as ring, closing(mb.Receiver(plan, ring.handles())) as receiver:
        for bucket in ring.fill(mb.iter_hf_weights(models), acknowledged=lambda: None, in_flight=1):
            with receiver.open(bucket.number) as pairs:
                yield pairs, ring.slot(bucket), bucket.columns()
        receiver.finish()


def in_rounds(models: Any, folders: Sequence[Path], *, multimodal: bool | None = None) -> tuple[list[str], set[str]]:
    """Send the weights of each folder to an engine that begins with NaN, in each of ``WAYS``, from models of one mesh.

    Returns:
        Differences from the engine's own reading of the folder after each round, and warnings; and the names that the
        engine leaves out.
    """
    found = []
    with sglang_engine.server(str(folders[0]), multimodal=multimodal) as server:
        served = server.read(str(folders[0]))
        updater = server.updater(served)
        forget(served)
        for folder, way in zip(folders, WAYS, strict=True):
            mb.load_hf_weights(models, folder)
            with sglang_engine.warned() as warnings:
                updater.begin_weight_update()
                way(updater, models)
                updater.end_weight_update(run_post_load=False)
            off = differences(served, server.read(str(folder)))
            found += [f"{way.__name__}: {each}" for each in (*warnings, *off)]
        exported = mb.to_hf_state_dict(models)
        groups = [[piece.name for piece in bucket.pieces] for bucket in smallest_buckets(mb.manifest(models)).buckets]
        return found, sglang_engine.unused(updater, served, [[(n, exported[n]) for n in group] for group in groups])
