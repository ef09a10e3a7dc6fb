"""Merged exports equal ``peft``'s merge in fp64, bit for bit on each mesh, and do not change the base."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError, ExportError
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.trainers.megatron_bridge import AutoBridge
from mcore_bridge.weights.manifest import digest
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.sent import merging
from mcore_bridge.weights.transfer.endpoints import Held, Sources
from mcore_bridge.weights.transfer.program import Program
from tests import zoo
from tests.support import experts, pool, stepping, tiny
from tests.support.fake_mesh import rank_of
from tests.support.peft_merges import merged as merged_by_peft
from tests.support.peft_models import ALPHA, EXPERTS, RANK, fill, held
from tests.support.pieces import merged as joined

SMALL = 1 << 14  # the size of a few parameters, so that exports take many messages
FEW = {"copy": False, "bucket_bytes": SMALL}
BF16, FP32 = torch.bfloat16, torch.float32
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SP = {"tp": 2, "sp": True}
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "q_proj", "v_proj")
CASES = {
    "llama": (lambda: tiny.config("llama"), ("q_proj", *DENSE[2:]), ({"tp": 2}, SP, {"pp": 2}, {})),
    "llama, dora": (lambda: tiny.config("llama"), ("q_proj", *DENSE[2:]), (SP, {"pp": 2})),
    "qwen3_moe": (lambda: experts.HF, (*DENSE[:4], *EXPERTS), ({"ep": 2}, {**SP, "etp": 2}, {"pp": 2})),
    "gpt_oss": (lambda: zoo.cases()["gpt_oss"].hf, EXPERTS, ({"ep": 2},)),
    "deepseek_v3-dense": (lambda: zoo.cases()["deepseek_v3-dense"].hf, LATENT, (SP, {"pp": 2})),
    "qwen3.5": (lambda: zoo.cases()["qwen3.5"].hf, DELTA, ({"tp": 2},)),
    "llama4": (lambda: zoo.cases()["llama4"].hf, EXPERTS, ({**SP, "etp": 2},)),
}

FACTORS = {"llama": FP32}
"""The dtype of adapters, if it differs from the dtype of the weights."""


def digests(pairs):
    return {name: digest(tensor) for name, tensor in pairs}


def exports(folder, case, factors, dtype):
    """Runs in each worker: for each mesh the digests of each kind of export, and all pieces."""
    found, (_, targets, meshes), out = [], CASES[case], Path(folder) / "never"
    for number, sizes in enumerate(meshes):
        dims = mb.ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = mb.build_model(folder, dims=dims, dtype=dtype, device="cpu")
            plain = mb.manifest(chunks, digests=True)
            assert [mb.manifest(chunks, digests=True, merged=merged) for merged in (True, False)] == [plain, plain]
            options = {"targets": targets, "expert_format": "fused", "dtype": FACTORS.get(case)}
            options["dora"] = case.endswith("dora")
            fill(chunks, add_adapters(chunks, rank=RANK, alpha=ALPHA, **options), factors)
            before = {name: tensor.clone() for name, tensor in held_tensors(chunks).items()}
            kinds = {}
            for merged in (True, False):
                options = {"expert_format": "fused", "merged": merged}
                manifest = mb.manifest(chunks, digests=True, **options)
                kinds[f"{merged}"] = {spec.name: spec.sha256 for spec in manifest}
                kinds[f"{merged}, few at a time"] = digests(mb.iter_hf_weights(chunks, **FEW, **options))
                if dist.get_rank() < 2:
                    target = ("everything", "nothing")[dist.get_rank()]
                    sliced = digests(mb.iter_hf_weights(chunks, target=target, bucket_bytes=SMALL, **options))
                    assert sliced == ({} if target == "nothing" else kinds[f"{merged}"])
                if not number:
                    mb.save_hf_checkpoint(chunks, Path(folder) / "saved", **options)
                    saved = mb.Manifest.from_folder(Path(folder) / "saved", digests=True)
                    assert not manifest.differences(saved), sizes
                theirs = AutoBridge(folder).export_hf_weights(chunks, merge_adapter_weights=merged)
                assert digests(theirs) == digests(mb.iter_hf_weights(chunks, merged=merged))
            unsaid = (
                mb.iter_hf_weights,
                mb.iter_hf_shards,
                mb.manifest,
                lambda models: mb.save_hf_checkpoint(models, out),
            )
            for export in unsaid:
                with pytest.raises(BridgeError, match=r"expected merged=True .* found merged=None"):
                    list(export(chunks))
            with pytest.raises(ExportError, match="merged must be True or False, or None, found 1"):
                mb.to_hf_state_dict(chunks, merged=1)
            if sizes:  # otherwise each rank is a replica
                differ = r"same merged and adapters on every rank, found .*merged=(True|False), adapters=.*; .*merged="
                with pytest.raises(ExportError, match=differ):
                    mb.to_hf_state_dict(chunks, merged=dist.get_rank() == 0)
            if case.endswith("dora") and dims.tp > 1:
                with pytest.raises(ExportError, match=r"needs the lengths of rows .*: use iter_hf_weights"):
                    list(mb.iter_hf_shards(chunks, merged=True))
                found.append((sizes, kinds, []))
                continue
            pieces = [*mb.iter_hf_shards(chunks, expert_format="fused", merged=True)]
            assert all(torch.equal(before[name], tensor) for name, tensor in held_tensors(chunks).items()), sizes
            found.append((sizes, kinds, pieces))
    return found


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("llama", BF16),
        ("llama", FP32),
        ("llama, dora", BF16),
        ("qwen3_moe", BF16),
        ("qwen3_moe", FP32),
        ("gpt_oss", BF16),
        ("llama4", BF16),
        ("deepseek_v3-dense", BF16),
        ("qwen3.5", BF16),
    ],
)
def test_the_bits_are_those_of_peft_in_fp64_on_each_mesh(case, dtype, tmp_path):
    if not case.startswith("llama") and not zoo.NEWEST:
        pytest.skip("transformers 4 has a module for each expert, to which peft gives other names")
    make, targets, _ = CASES[case]
    tiny.random_checkpoint(make(), tmp_path, dtype=dtype)
    options = {"factors": FACTORS.get(case), "use_dora": case.endswith("dora")}
    factors, base, merged = merged_by_peft(make(), targets, dtype, **options)
    ranks = pool.run(2, exports, str(tmp_path), case, factors, dtype)
    assert not (tmp_path / "never").exists()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert all(any(target in name for name in changed) for target in targets)
    for results in zip(*ranks, strict=True):
        for sizes, kinds, _ in results:
            for kind, found in kinds.items():
                assert found == digests((merged if kind.startswith("True") else base).items()), (sizes, kind)
        if not results[0][2]:
            continue
        whole = joined([piece for _, _, pieces in results for piece in pieces])
        assert all(torch.equal(whole[name], tensor.float()) for name, tensor in merged.items()), results[0][0]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_base_is_as_it_was_after_a_hundred_syncs(dtype):
    """Adapters change in between, as by steps. At the end they have their first values, and so do merged weights."""
    with rank_of(mb.ParallelDims(), 0, 1):
        chunks = mb.build_model(tiny.config("llama"), load_weights=False, device="cpu", dtype=dtype)
        plain = digests(mb.iter_hf_weights(chunks))
        fill(chunks, add_adapters(chunks, rank=RANK, alpha=ALPHA, targets=DENSE))
        first = digests(mb.iter_hf_weights(chunks, merged=True))
        assert sum(first[name] != plain[name] for name in plain) == len(DENSE) * chunks[0].config.num_layers
        for _ in range(100):
            with torch.no_grad():
                for name, parameter in held(chunks).items():
                    parameter.mul_(-1 if "linear_in" in name else 1)
            last = dict(mb.iter_hf_weights(chunks, merged=True))
        assert digests(last.items()) == first
        assert digests(mb.iter_hf_weights(chunks, merged=False)) == plain


def count(folder):
    """Runs in each worker: how often each weight was merged, the most merged bytes at once, and all merged bytes."""
    own, made, most = merging.merged_weight, {}, 0

    def merge(adapter, weight):
        nonlocal most
        new = own(adapter, weight)
        made.setdefault(weight.data_ptr(), []).append(weakref.ref(new))
        most = max(most, sum(ref().nbytes for refs in made.values() for ref in refs if ref() is not None))
        return new

    with stepping.mesh(mb.ParallelDims(tp=2)), mock.patch.object(merging, "merged_weight", merge):
        chunks = mb.build_model(folder, dims=mb.ParallelDims(tp=2), dtype=FP32, device="cpu")
        add_adapters(chunks, rank=1, alpha=1, targets=DENSE)
        pairs = mb.iter_hf_weights(chunks, bucket_bytes=SMALL, merged=True)
        for number, _ in enumerate(pairs):
            if number == 0:
                assert len(made) < 5, "nothing is merged before its message"
        assert not any(ref() for refs in made.values() for ref in refs), "the last is dropped with its message"
        weights = [module.weight for chunk in chunks for module in chunk.modules() if hasattr(module, "adapter")]
    times = {len(refs) for refs in made.values()}
    return times, len(made), len(weights), most, sum(weight.nbytes for weight in weights)


def test_a_rank_holds_few_merged_weights(tmp_path):
    tiny.random_checkpoint(tiny.config("llama", num_hidden_layers=8), tmp_path)
    for times, made, num_weights, most, total in pool.run(2, count, str(tmp_path)):
        assert (times, made) == ({1}, num_weights), "each weight is merged, once"
        assert most < total / 6, (most, total)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_sums_are_rounded_once(dtype):
    one = torch.ones(1, dtype=torch.float64)
    step = torch.finfo(dtype).eps
    middle, little = 1 + step / 2, 2**-30
    for start, rounded in (
        (middle, 1), (middle + little, 1 + step), (middle - little, 1),
        (middle + step, 1 + 2 * step), (middle + step - little, 1 + step), (1, 1), (0, 0), (torch.inf, torch.inf),
    ):  # fmt: skip
        for sign in (1, -1):
            assert merging._rounded(one * sign * start, dtype).double() == sign * rounded, (dtype, start)


def test_a_merged_weight_is_dropped_where_no_message_soon_has_a_part_of_it():
    made, own = [], {name: torch.ones(2) for name in "ab"}

    def merge(tensor):
        merged = tensor + 1
        made.append(weakref.ref(merged))
        return merged

    names, plan = ("a", "b"), SimpleNamespace(messages=range(3))
    program = SimpleNamespace(names=names, parameters=names, made_of=np.arange(2), idle_after={2: {0}}, plan=plan)
    sources = Sources(program, Held(own, dict.fromkeys(own, merge)))
    for message in range(3):
        assert [float(tensor[0]) for tensor in sources.read_by(SimpleNamespace(held=(0, 1))).tensors] == [2, 2]
        sources.passed(message)
    assert [merged() is None for merged in made] == [True, False]
    assert [float(tensor[0]) for tensor in sources.read_by(SimpleNamespace(held=(1,))).tensors] == [1, 2]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0, 1), (5, 5)], [1, 5]),  # messages 2 to 4 are without it
        ([(0, 1), (4, 5)], [5]),
        ([(4, 5), (0, 6), (10, 12)], [6, 12]),  # runs of several receivers overlap
    ],
)
def test_a_tensor_is_idle_between_messages_that_are_not_in_flight_together(runs, expected):
    streams = [[SimpleNamespace(entry=0, message=first, last=lambda last=last: last) for first, last in runs]]
    plan = SimpleNamespace(streams=streams, payload=SimpleNamespace(entries="a"), messages=range(13))
    program = SimpleNamespace(plans=[plan], plan=plan, rank=0, _number=lambda _: 7)
    assert Program.idle_after.func(program) == {message: [7] for message in expected}
