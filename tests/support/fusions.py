"""Tensors that engines fuse within one load call, by HF names: a second list, independent of the library's."""

import re
from collections.abc import Iterable

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.buckets import BucketPlan, plan_buckets
from mcore_bridge.weights.plan.export_plan import ExportPlan

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wk", "weights_proj"),
)


def siblings(names: Iterable[str]) -> list[set[str]]:
    """Names of the tensors of which an engine makes one parameter."""
    known = sorted(names)
    matches = [(re.fullmatch(rf"(.*\.){first}(\..*)", name), others) for first, *others in FUSED for name in known]
    return [{m[0], *(f"{m[1]}{other}{m[2]}" for other in others)} & {*known} for m, others in matches if m]


def experts(specs: Iterable[TensorSpec], num_bytes: int) -> list[set[str]]:
    """Names of the experts of each layer whose experts together take at most this number of bytes."""
    layers: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        layer, experts, rest = spec.name.partition(".experts.")
        is_expert = experts and rest != "e_score_correction_bias"  # of the router, whatever its name is
        layers.setdefault(layer if is_expert else "", []).append(spec)
    layers.pop("", None)
    return [{each.name for each in found} for found in layers.values() if sum(s.num_bytes for s in found) <= num_bytes]


def apart(home: dict[str, int], groups: Iterable[set[str]]) -> list[set[str]]:
    """The groups whose names are in no common message or slot."""
    return [group for group in groups if len({home[name] for name in group}) > 1]


def require_together(plan: ExportPlan, bucket_bytes: int) -> None:
    """Assert that fused tensors are together in the messages of an export and in the slots of a ring, small and
    large.
    """
    specs = list(plan.tensors())
    groups = siblings(spec.name for spec in specs)
    given_out = {plan.payload.outputs[i].name: number for number, each in enumerate(plan.messages) for i in each.done}
    assert apart(given_out, [group & given_out.keys() for group in groups + experts(specs, bucket_bytes)]) == []
    smallest = smallest_buckets(specs)
    for buckets in smallest, plan_buckets(specs, slot_bytes=4 * smallest.slot_bytes):
        home = {piece.name: bucket.number for bucket in buckets.buckets for piece in bucket.pieces}
        whole = experts(specs, buckets.slot_bytes // 2)  # with alignment, tensors take more space
        assert apart(home, groups + whole) == []


def smallest_buckets(specs: Iterable[TensorSpec]) -> BucketPlan:
    """Assign tensors to slots that are as small as possible."""
    try:
        return plan_buckets(specs, slot_bytes=1)
    except TransferError as refusal:
        return plan_buckets(specs, slot_bytes=int(str(refusal).partition("slot_bytes=")[2].split()[0]))
