"""Each argument of a call that all ranks make is compared between them, or this file has a reason why it may differ."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import LlamaConfig

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError
from mcore_bridge.weights.ipc.shared_memory import allocate, share
from tests.support import eagle3, pool, stepping
from tests.support.strategies import random_state, tiny
from tests.support.strategies import save as save_state

COMPARED = "compared"
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
OWN = "each rank has its own"
AS_RECEIVED = "a rank gets whole tensors, or what it asks for, and casts or moves them by itself"
ALONE = "a load communicates with nobody: a rank may load alone, and from tensors of its own stage"
NOTHING = "nothing communicates"
NEXT = "nothing communicates, and the next function that does so compares what each rank's models are"
LATER = "the next forward compares whether adapters are on"
_EXPORT = {
    "models": OWN,
    "dtype": AS_RECEIVED,
    "device": AS_RECEIVED,
    "target": AS_RECEIVED,
    **dict.fromkeys(("hf", "head", "expert_format", "bucket_bytes", "merged", "quantize"), COMPARED),
}
_FOLDER = {"models": OWN, **dict.fromkeys(("folder", "hf", "head"), COMPARED)}
TABLE: dict[str, dict[str, str]] = {
    "ParallelDims.initialize": {"self": COMPARED, "device": COMPARED, "seed": COMPARED, "timeout": OWN},
    "build_model": {
        **dict.fromkeys(("hf", "dims", "dtype", "backend", "head", "overrides", "load_weights"), COMPARED),
        **dict.fromkeys(("freeze", "seed", "vision", "model"), COMPARED),
        "device": OWN,
        "on_chunk": OWN,
        "strict_config": "it only refuses, and where one rank refuses its model, all raise",
    },
    "build_draft": {
        "models": OWN,
        **dict.fromkeys(("hf", "dtype", "backend", "overrides", "token_ids", "freeze", "seed"), COMPARED),
    },
    "drafting": dict.fromkeys(
        ("models", "drafts", "steps"), "forward compares them, and a caller without it is on its own"
    ),
    "forward": {
        "models": OWN,
        **dict.fromkeys(("input_ids", "attention_mask", "images", "adapters", "drafts", "loss"), COMPARED),
        **dict.fromkeys(("hf", "head", "draft_steps"), COMPARED),
        **dict.fromkeys(("micro_batch_size", "temperature", "packed", "multiple_of"), COMPARED),
    },
    "log_probs": {"logits": OWN, "group": OWN, **dict.fromkeys(("labels", "vocab_size", "temperature"), COMPARED)},
    "iter_hf_weights": {**_EXPORT, "copy": AS_RECEIVED},
    "to_hf_state_dict": _EXPORT,
    "export_into": {
        "writer": AS_RECEIVED,
        **{name: reason for name, reason in _EXPORT.items() if name not in ("dtype", "device", "target")},
    },
    "manifest": {**{name: reason for name, reason in _EXPORT.items() if name != "device"}, "digests": COMPARED},
    "save_hf_checkpoint": {
        **_FOLDER,
        **dict.fromkeys(
            ("dtype", "expert_format", "keep", "max_shard_bytes", "slot_bytes", "merged", "quantize", "mtp", "wait"),
            COMPARED,
        ),
        "host_bytes": OWN,
    },
    "save_checkpoint": {
        **_FOLDER,
        **dict.fromkeys(("optimizer", "common", "part", "wait"), COMPARED),
        "host_bytes": OWN,
    },
    "load_checkpoint": {**_FOLDER, **dict.fromkeys(("optimizer", "dtype", "strict", "part"), COMPARED)},
    "add_adapters": {
        "models": OWN,
        **dict.fromkeys(
            ("folder", "rank", "alpha", "targets", "kind", "dropout", "dora", "expert_format", "dtype", "init", "seed"),
            COMPARED,
        ),
        "name": COMPARED,
    },
    "load_adapters": {"models": OWN, "folder": COMPARED, "dtype": COMPARED},
    "iter_hf_adapters": {name: _EXPORT[name] for name in ("models", "dtype", "device", "bucket_bytes", "target")},
    "save_hf_adapters": {
        **dict.fromkeys(("models", "host_bytes"), OWN),
        **dict.fromkeys(("folder", "dtype", "slot_bytes", "wait"), COMPARED),
    },
    "set_adapters": {"models": OWN, "name": COMPARED},
    "without_adapters": {"models": LATER},
    "adopt": dict.fromkeys(("models", "hf", "head"), NEXT),
    "load_hf_weights": dict.fromkeys(
        ("models", "source", "hf", "head", "dtype", "expert_format", "strict", "slot_bytes"), ALONE
    ),
    "vllm_source": {"models": OWN, **dict.fromkeys(("backend", "expert_format", "merged", "quantize"), COMPARED)},
    "iter_hf_shards": dict.fromkeys(("models", "hf", "head", "expert_format", "merged"), NOTHING),
    "pack_sequences": dict.fromkeys(
        ("input_ids", "attention_mask", "dims", "cp_rank", "packed", "multiple_of", "min_tokens"), NOTHING
    ),
    "to_transformer_config": dict.fromkeys(("hf", "dims", "dtype", "overrides", "strict_config"), NOTHING),
    "to_gpt_arguments": dict.fromkeys(("hf", "dims", "head", "overrides"), NOTHING),
    "to_layer_spec": dict.fromkeys(("hf", "dims", "dtype", "backend", "overrides", "pp_rank", "vp_stage"), NOTHING),
}
"""Each public function with models, a mesh or a group: whether ranks compare each argument, or why not."""
CELLS = [(name, argument) for name, row in TABLE.items() for argument, reason in row.items() if reason == COMPARED]


def test_the_table_has_each_argument_of_each_call() -> None:
    functions = {name: value for name in mb._HOMES if inspect.isfunction(value := getattr(mb, name))}
    arguments = {name: inspect.signature(value).parameters for name, value in functions.items()}
    shared = {name: {*known} for name, known in arguments.items() if {"models", "dims", "group"} & known.keys()}
    shared["ParallelDims.initialize"] = {*inspect.signature(mb.ParallelDims.initialize).parameters}
    shared["build_model"] = {*arguments["build_model"]}
    assert shared == {name: {*row} for name, row in TABLE.items()}


HF = tiny("qwen3", num_hidden_layers=3, num_key_value_heads=2, vocab_size=96)
OTHER_HF = tiny("qwen3", num_hidden_layers=3, num_key_value_heads=2, vocab_size=96, rope_theta=777.0)
IDS = [0, 1, 2]
DRAFT = eagle3.fields_of(HF, draft_vocab_size=32, eagle_aux_hidden_state_layer_ids=IDS)
MESH = mb.ParallelDims(tp=2, sp=True)
NEW: dict[str, Any] = {"rank": 2, "alpha": 4, "targets": ["q_proj"]}


class Optimizer:
    """Replaces an optimizer of megatron-core. It is never called."""

    def sharded_state_dict(self) -> None: ...


def _built(hf: Any = HF, **options: Any) -> Any:
    usual = {"dims": MESH, "dtype": torch.float32, "device": "cpu", "load_weights": False}
    return mb.build_model(hf, **{**usual, **options})


def _usual(name: str, folders: dict[str, str], models: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The call, the arguments of the first rank, and different values for the second rank, one at a time."""
    plain, adapted, other = (
        models.get("plain"),
        models.get("adapted"),
        {"hf": OTHER_HF, "head": "value", "expert_format": "fused"},
    )
    of_all = {**other, "bucket_bytes": 1 << 20, "merged": True, "digests": True, "quantize": FP8}
    ids = torch.arange(8).view(2, 4)
    out = folders["out"]
    if name in ("iter_hf_weights", "to_hf_state_dict", "manifest"):
        function = getattr(mb, name)
        return lambda **given: [*function(**given)], {"models": adapted, "hf": HF, "merged": False}, of_all
    if name == "export_into":
        mark = allocate(8, torch.device("cpu"))
        engine_map = mb.EngineMap("", (), (), ())
        writer = mb.EngineWriter(engine_map, [share(mark, engine_map.digest)])
        return mb.export_into, {"models": adapted, "writer": writer, "hf": HF, "merged": False}, of_all
    if name == "forward":
        usual = {"models": plain, "input_ids": ids, "hf": HF}
        of_call = {"temperature": 0.5, "packed": False, "multiple_of": 4, "micro_batch_size": 1, "draft_steps": 2}
        mask, images = torch.tensor([[1, 1, 1, 0]] * 2), [{"pixel_values": ids}] * 2
        learn = {"loss": lambda outputs, rows: outputs.log_probs.sum()}
        batch = {"input_ids": ids + 1, "attention_mask": mask, "images": images, "adapters": [None, None]}
        batch["drafts"] = mb.build_draft(plain, LlamaConfig(**DRAFT), token_ids=torch.arange(32))
        return mb.forward, usual, {**other, **of_call, **batch, **learn}
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "ParallelDims.initialize": (
            lambda sizes=MESH, **given: sizes.initialize(**{"device": "cpu", **given}),
            {},
            {"self": {"sizes": mb.ParallelDims(pp=2)}, "device": "cuda", "seed": 7},
        ),
        "build_model": (
            _built,
            {"hf": HF},
            {
                "hf": OTHER_HF,
                "dims": mb.ParallelDims(tp=2),
                "dtype": torch.bfloat16,
                "backend": "te",
                "head": "value",
                "overrides": {"attention_dropout": 0.5},
                "load_weights": folders["first"],
                "freeze": ["*"],
                "seed": 1,
                "vision": "train",
                "model": "none",
            },
        ),
        "build_draft": (
            mb.build_draft,
            {"models": plain, "hf": LlamaConfig(**DRAFT), "token_ids": torch.arange(32)},
            {
                "hf": LlamaConfig(**DRAFT, rope_theta=777.0),
                "dtype": torch.bfloat16,
                "backend": "te",
                "overrides": {"attention_dropout": 0.5},
                "token_ids": torch.arange(1, 33),
                "freeze": ["*"],
                "seed": 1,
            },
        ),
        "log_probs": (
            mb.log_probs,
            {
                "logits": torch.zeros(2, 4, 48),
                "labels": ids,
                "vocab_size": 96,
                "group": parallel_state.get_tensor_model_parallel_group() if models else None,
            },
            {"labels": ids + 1, "vocab_size": 95, "temperature": 0.5},
        ),
        "save_hf_checkpoint": (
            mb.save_hf_checkpoint,
            {"models": plain, "folder": out, "hf": HF},
            {
                **other,
                "folder": f"{out}-2",
                "dtype": torch.bfloat16,
                "keep": True,
                "merged": True,
                "quantize": FP8,
                "mtp": "dropped",
                "max_shard_bytes": 1000,
                "slot_bytes": 1000,
                "wait": False,
            },
        ),
        "save_checkpoint": (
            mb.save_checkpoint,
            {"models": adapted, "folder": out, "hf": HF, "common": {"iteration": 1}},
            {
                **other,
                "folder": f"{out}-2",
                "optimizer": Optimizer(),
                "part": "base",
                "common": {"iteration": 2},
                "wait": False,
            },
        ),
        "load_checkpoint": (
            mb.load_checkpoint,
            {"models": plain, "folder": folders["dist"], "hf": HF},
            {
                **other,
                "folder": folders["dist 2"],
                "optimizer": Optimizer(),
                "part": "base",
                "dtype": torch.bfloat16,
                "strict": False,
            },
        ),
        "add_adapters": (
            mb.add_adapters,
            {"models": plain, **NEW},
            {
                "folder": {"folder": folders["lora"], "rank": None, "alpha": None, "targets": None},
                "rank": 4,
                "alpha": 5,
                "targets": ["q_proj", "v_proj"],
                "dropout": 0.5,
                "dora": True,
                "name": "other",
                "kind": "shared",
                "expert_format": "fused",
                "dtype": torch.bfloat16,
                "init": "xavier",
                "seed": 1,
            },
        ),
        "vllm_source": (
            mb.vllm_source,
            {"models": adapted, "backend": "nccl", "merged": False},
            {"backend": "ipc", "expert_format": "fused", "merged": True, "quantize": FP8},
        ),
        "set_adapters": (mb.set_adapters, {"models": adapted, "name": "default"}, {"name": "other"}),
        "load_adapters": (
            mb.load_adapters,
            {"models": adapted, "folder": folders["lora"]},
            {"folder": folders["lora 2"], "dtype": torch.bfloat16},
        ),
        "iter_hf_adapters": (
            lambda **given: [*mb.iter_hf_adapters(**given)],
            {"models": adapted},
            {"bucket_bytes": 1 << 20},
        ),
        "save_hf_adapters": (
            mb.save_hf_adapters,
            {"models": adapted, "folder": out},
            {"folder": f"{out}-2", "dtype": torch.bfloat16, "slot_bytes": 1000, "wait": False},
        ),
    }
    return cases[name]


def calls(folders: dict[str, str]) -> dict[tuple[str, str], str]:
    """Run in each of two workers: the outcome of each call with different arguments on the two ranks."""
    said: dict[tuple[str, str], str] = {}

    def differ(names: list[str], models: dict[str, Any]) -> None:
        for name in names:
            function, usual, others = _usual(name, folders, models)
            for argument in [argument for cell, argument in CELLS if cell == name]:
                other = others[argument]
                if usual.get("folder", "").startswith(folders["out"]):  # rank 0 may still remove the folder of a call
                    usual["folder"] = f"{folders['out']} {name} {argument}"
                changed = other if isinstance(other, dict) and argument in ("self", "folder") else {argument: other}
                try:
                    function(**{**usual, **(changed if dist.get_rank() == 1 else {})})
                    said[name, argument] = ""
                except BridgeError as error:
                    said[name, argument] = str(error)

    stepping.leave_mesh()
    differ(["ParallelDims.initialize"], {})
    with stepping.mesh(MESH):
        differ(["build_model"], {})
        adapted = _built(load_weights=folders["first"])
        mb.add_adapters(adapted, **NEW, name="other")
        mb.add_adapters(adapted, **NEW)
        models = {"plain": _built(load_weights=folders["first"]), "adapted": adapted}
        mb.save_hf_adapters(adapted, folders["lora"])
        for parameter in adapted[0].parameters():
            parameter.data += 0.5 if parameter.requires_grad else 0.0
        mb.save_hf_adapters(adapted, folders["lora 2"])
        for place in ("dist", "dist 2"):
            mb.save_checkpoint(models["plain"], folders[place], common={"place": place})
        differ(
            [name for name in TABLE if name in dict(CELLS) and name not in ("ParallelDims.initialize", "build_model")],
            models,
        )
        mb.forward(models["plain"], torch.arange(8).view(2, 4))  # no file is incomplete
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], str]]:
    root: Path = tmp_path_factory.mktemp("shared")
    (root / "first").mkdir()
    save_state(random_state(HF), HF, root / "first")
    names = ("first", "lora", "lora 2", "dist", "dist 2", "out")
    return pool.run(2, calls, {name: str(root / name) for name in names}, timeout=120)


@pytest.mark.parametrize("cell", CELLS, ids=".".join)
def test_ranks_that_differ_in_an_argument_both_raise(
    cell: tuple[str, str], said: list[dict[tuple[str, str], str]]
) -> None:
    """Otherwise one rank would wait for the other, or both would compute with a mixture of the two values."""
    first, second = (of_rank[cell] for of_rank in said)
    word = {"self": "dims", "attention_mask": "input_ids"}.get(cell[1], cell[1])
    assert word in first, first
    assert word in second, second
    assert "rank 1" in first, first
