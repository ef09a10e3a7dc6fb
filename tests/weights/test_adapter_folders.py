"""Adapters as PEFT folders: ``peft`` and this library write equal bits, on each mesh."""

import json
import re
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mcore_bridge import ParallelDims, build_model
from mcore_bridge.errors import BridgeError, CheckpointError, ConfigError, MappingError
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.adapters import base_name
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.load import load_hf_weights
from mcore_bridge.weights.peft import peft_read
from mcore_bridge.weights.peft.hf_adapters import iter_hf_adapters, load_adapters, save_hf_adapters
from mcore_bridge.weights.peft.peft_config import PeftNames
from mcore_bridge.weights.peft.peft_folder import open_peft
from mcore_bridge.weights.plan.target import EngineRank
from mcore_bridge.weights.provenance import provenance_of
from tests import zoo
from tests.support import experts, fake_mesh, pool, seeing, stepping, tiny, towers
from tests.support.peft_models import ALPHA, EXPERTS, NARROW, RANK, batch, entries, named, of_peft
from tests.support.strategies import problems, random_state, sparse_problems

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DROPOUT = 0.05
TP2 = {"tp": 2, "sp": True}
CASES = {
    "qwen3": (lambda: tiny.config("qwen3"), ("q_proj", "v_proj", "down_proj"), (TP2, {"pp": 2})),
    "qwen3, dora": (lambda: tiny.config("qwen3"), ("q_proj", "v_proj", "down_proj"), (TP2, {"pp": 2})),
    "qwen3_moe": (lambda: experts.HF, ("o_proj", *EXPERTS), ({"ep": 2}, {**TP2, "etp": 2})),
    "gpt_oss": (lambda: zoo.cases()["gpt_oss"].hf, EXPERTS, ({"ep": 2},)),
    "granitemoe": (lambda: zoo.cases()["granitemoe"].hf, EXPERTS, ({"ep": 2},)),
    "mixtral": (lambda: zoo.cases()["mixtral"].hf, EXPERTS, ({"ep": 2},)),
    "nemotron_h": (lambda: zoo.cases()["nemotron_h"].hf, ("q_proj", *NARROW), ({"ep": 2},)),
    "llama4": (lambda: zoo.cases()["llama4"].hf, EXPERTS, ({"ep": 2},)),
    "laguna": (lambda: zoo.cases()["laguna"].hf, ("q_proj", "g_proj", "o_proj"), (TP2, {"pp": 2})),
    "gemma4": (lambda: zoo.cases()["gemma4"].hf, ("q_proj", "v_proj", "o_proj"), (TP2, {"pp": 2})),
    "gemma4-experts": (
        lambda: zoo.cases()["gemma4-experts"].hf,
        ("o_proj", *EXPERTS),
        ({"ep": 2}, {**TP2, "etp": 2}),
    ),
    "bailing_hybrid": (lambda: zoo.cases()["bailing_hybrid"].hf, ("f_proj", "g_proj", "o_proj"), (TP2, {"pp": 2})),
    "lfm3": (lambda: zoo.cases()["lfm3"].hf, ("g_proj", "o_proj", "in_proj"), (TP2,)),
    "hy_v4": (lambda: zoo.cases()["hy_v4"].hf, ("q_b_proj", "kv_a_proj_with_mqa", "o_proj"), (TP2,)),
    "glm5_next_text": (
        lambda: zoo.cases()["glm5_next_text"].hf,
        ("f_a_proj", "b_proj", "q_b_proj", "kv_b_proj", "o_proj"),
        (TP2,),
    ),
    "deepseek_v4": (
        lambda: zoo.cases()["deepseek_v4"].hf,
        ("self_attn.q_b_proj", "self_attn.kv_proj", "compressor.kv_proj", "o_b_proj"),
        (TP2,),
    ),
    "minimax_m3_vl_text": (
        lambda: zoo.cases()["minimax_m3_vl_text"].hf,
        ("self_attn.q_proj", "o_proj", *EXPERTS),
        ({"ep": 2}, TP2),
    ),
    "qwen4_exp_text": (
        lambda: zoo.cases()["qwen4_exp_text"].hf,
        ("in_proj_qkv", "q_proj", "o_proj", "shared_expert.up_proj", *EXPERTS),
        ({"ep": 2}, TP2),
    ),
    "step3p5": (lambda: zoo.cases()["step3p5"].hf, ("g_proj", "shared_experts.up_proj", *EXPERTS), ({"ep": 2}, TP2)),
    "afmoe": (lambda: zoo.cases()["afmoe"].hf, ("v_proj", "o_proj"), (TP2,)),
}
SINCE_5 = {
    "laguna",
    "gemma4",
    "gemma4-experts",
    "afmoe",
    "bailing_hybrid",
    "lfm3",
    "step3p5",
    "hy_v4",
    "glm5_next_text",
    "deepseek_v4",
    "minimax_m3_vl_text",
    "qwen4_exp_text",
}
CASES = {name: CASES[name] for name in CASES if name not in SINCE_5 - zoo.cases().keys()}


GATED = ("gate_up_proj", "down_proj")
IN_FILES = {
    "deepseek_v4": ("attn.wq_b", "attn.wkv", "attn.compressor.wkv", "wo_b"),
    "granitemoe": ("input_linear", "output_linear"),
    "bailing_hybrid": ("f_proj", "g_proj", "o_proj", "dense"),
    "step3p5": ("g_proj", "share_expert.up_proj", "moe.gate_up_proj", "moe.down_proj"),
    "lfm3": ("self_attn.gate_proj", "o_proj", "in_proj"),
}
"""Targets of families whose names in files differ from transformers' names in memory."""


def adapted(hf, targets, **options):
    """A model with an adapter of random values, by ``peft``."""
    config = peft.LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, **of_peft(targets), **options})
    model = peft.get_peft_model(tiny.random_model(hf), config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def saved(folder, meshes, targets, values, dora):
    """Runs in each worker: reads the folder of ``peft`` on each mesh, and writes one for it."""
    for number, sizes in enumerate(meshes):
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
            if number:
                add_adapters(chunks, f"{folder}/peft")
            else:
                options = {"targets": targets, "expert_format": "fused", "dora": dora, "dropout": DROPOUT * dora}
                add_adapters(chunks, rank=RANK, alpha=ALPHA, **options)
                load_adapters(stepping.wrap(chunks), f"{folder}/peft")
            found = entries(iter_hf_adapters(chunks))
            assert found.keys() == values.keys()
            assert all(torch.equal(found[name], values[name]) for name in values)
            written = save_hf_adapters(stepping.wrap(chunks), Path(folder) / f"adapter{number}")
            assert not written.differences(type(written).from_folder(Path(folder) / f"adapter{number}"))


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_that_of_peft(case, tmp_path):
    make, targets, meshes = CASES[case]
    if targets[-1] in EXPERTS + NARROW and not zoo.NEWEST:
        pytest.skip("transformers 4 has a module for each expert")
    tiny.random_checkpoint(make(), tmp_path)
    dora = case.endswith("dora")
    model = adapted(make(), targets, use_dora=dora, lora_dropout=DROPOUT * dora)
    model.save_pretrained(tmp_path / "peft")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    values = dict(named(parameters, make(), "fused"))
    pool.run(2, saved, str(tmp_path), meshes, IN_FILES.get(case, targets), values, dora)
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for number in range(len(meshes)):
        ours = load_file(tmp_path / f"adapter{number}" / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        config = json.loads((tmp_path / f"adapter{number}" / "adapter_config.json").read_text())
        assert (config["lora_dropout"], config["use_dora"]) == (DROPOUT * dora, dora)
    loaded = peft.PeftModel.from_pretrained(tiny.random_model(make()), tmp_path / "adapter0").eval()
    with torch.no_grad():
        assert torch.equal(loaded(batch()).logits, model(batch()).logits)


def folder_of(state, targets, folder, rank, *, stacks=0, kind="own"):
    """A PEFT folder with random factors for all weights in ``state`` that are targets; experts in stacks of so many."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, weight in state.items():
        module = name.removesuffix(".weight")
        shapes = {"lora_A": (rank, weight.shape[-1]), "lora_B": (weight.shape[0], rank)}
        if ".experts." in name and stacks:
            before, _, last = module.partition(".experts.")
            if last not in ("0.up_proj", "0.down_proj"):
                continue
            module = f"{before}.experts" + (".base_layer" if "up" in last else "")
            rows = weight.shape[0] * (2 if "up" in last else 1)
            shapes = {"lora_A": (stacks * rank, weight.shape[1]), "lora_B": (rows, rank * stacks)}
        elif not module.endswith(tuple(f".{target}" for target in targets)):
            continue
        for factor, shape in shapes.items():
            tensors[f"base_model.model.{module}.{factor}.weight"] = torch.randn(shape, generator=generator) * 0.1
    parameters = [f"mlp.{name}" for name in EXPERTS] if stacks else None
    firsts = {}
    for name in tensors if kind == "shared" else ():
        if "lora_A" in name:
            layer = re.sub(r"[qkv]_proj", "qkv", re.sub(r"(gate|up)_proj", "gate_up", name))
            tensors[name] = firsts.setdefault(layer, tensors[name]).clone()
    config = {"r": rank, "target_modules": targets, "target_parameters": parameters}
    write(folder, config, tensors)
    return tensors


def write(folder, config, tensors):
    """A PEFT folder."""
    Path(folder).mkdir(exist_ok=True)
    save_file(tensors, Path(folder) / "adapter_model.safetensors")
    (Path(folder) / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8, **config}))


def check_round_trip(hf, dims, targets, rank, folder, *, stacks=0, kind="own"):
    """Runs on every rank of a mesh: read a PEFT folder, and write equal bits under equal names."""
    tensors, made = folder_of(random_state(hf), targets, folder, rank, stacks=stacks, kind=kind), []
    held = fake_mesh.build_everywhere(
        hf, dims, lambda chunks: made.append(add_adapters(chunks, folder, kind=kind)), dtype=torch.float32
    )
    naming, found = PeftNames(GATED if stacks else ()), {}
    for name, tensor in fake_mesh.export(held).items():
        for each in (name, *made[0].further_names(name)):
            found[naming.to_peft(each)] = naming.unstacked(name, tensor)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


LISTS = st.lists(st.sampled_from(DENSE), min_size=1, unique=True)


KINDS = st.sampled_from(["own", "shared"])


@settings(max_examples=12)
@given(problems(), LISTS, st.integers(1, 4), KINDS)
def test_any_adapter_on_any_mesh(tmp_path_factory, problem, targets, rank, kind):
    check_round_trip(*problem, targets, rank, tmp_path_factory.mktemp("peft"), kind=kind)


@settings(max_examples=6)
@given(sparse_problems(), LISTS, st.booleans(), KINDS)
def test_any_adapter_of_experts_on_any_mesh(tmp_path_factory, problem, targets, is_stacked, kind):
    (hf, dims), folder = problem, tmp_path_factory.mktemp("peft")
    check_round_trip(hf, dims, targets, 2, folder, stacks=is_stacked * hf.num_experts, kind=kind)


def test_a_stage_may_have_no_adapter_but_not_all(tmp_path):
    check_round_trip(experts.HF, ParallelDims(pp=2), [], 2, tmp_path, stacks=8)  # its first layer is dense
    hf, dims = zoo.case("qwen3_moe", num_hidden_layers=1, num_experts=4, num_experts_per_tok=2).hf, ParallelDims()
    with rank_of(dims, 0, 1):
        chunks = build_model(hf, dims=dims, load_weights=False, device="cpu", dtype=torch.float32)
        with pytest.raises(BridgeError, match=r"that the model has, found \['mlp.down_proj'\]"):
            add_adapters(chunks, rank=2, alpha=2, targets=["o_proj", "mlp.down_proj"])  # of a dense layer


def ours(hf, folder):
    """The adapter of a model on one rank, as a PEFT folder."""
    dims, made = ParallelDims(), []
    held = fake_mesh.build_everywhere(
        hf, dims, lambda chunks: made.append(add_adapters(chunks, folder)), dtype=torch.float32
    )
    tensors = {PeftNames().to_peft(name): tensor for name, tensor in fake_mesh.export(held).items()}
    modules = sorted({name.split(".")[-3] for name in tensors})
    write(f"{folder}-ours", {"r": made[0].rank, "lora_alpha": made[0].alpha, "target_modules": modules}, tensors)
    return tensors, load_file(Path(folder) / "adapter_model.safetensors")


PATTERNS = {"rank_pattern": {"q_proj": 2, r"layers\.1\..*v_proj": 5}, "alpha_pattern": {"down_proj": 40}}


@pytest.mark.parametrize(
    ("options", "num_exact"),
    [
        ({**PATTERNS, "target_modules": r".*\.(q|v|down)_proj"}, 16),
        ({**PATTERNS, "use_rslora": True, "target_modules": "all-linear"}, 47),
    ],
    ids=["patterns", "rslora"],
)
def test_other_ranks_and_scales_become_one(options, num_exact, tmp_path):
    hf = tiny.config("qwen3")
    model = adapted(hf, (), **options)
    model.save_pretrained(tmp_path / "peft")
    tensors, theirs = ours(hf, str(tmp_path / "peft"))
    assert tensors.keys() == theirs.keys()
    is_same = [torch.equal(tensors[name][tuple(map(slice, theirs[name].shape))], theirs[name]) for name in theirs]
    assert sum(is_same) == num_exact
    loaded = peft.PeftModel.from_pretrained(tiny.random_model(hf), tmp_path / "peft-ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch()).logits, model(batch()).logits, atol=1e-5, rtol=1e-5)


def test_the_alpha_of_a_config_is_kept_although_its_scale_is_rounded(tmp_path):
    assert 29 / 7 * 7 != 29
    name = "model.layers.1.self_attn.q_proj.lora"
    tensors = {f"{name}_A.weight": torch.ones(7, 2), f"{name}_B.weight": torch.ones(2, 7)}
    write(tmp_path, {"r": 7, "lora_alpha": 29, "target_modules": ["q_proj"]}, tensors)
    assert open_peft(tmp_path, provenance_of(experts.HF), num_layers=2, num_experts=8).alpha == 29


def test_the_name_of_a_repository_in_the_local_cache_is_a_folder(tmp_path, monkeypatch):
    repository = tmp_path / "models--acme--lora"
    adapted(tiny.config("qwen3"), ("q_proj",)).save_pretrained(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with rank_of(ParallelDims(), 0, 1):
        models = build_model(tiny.config("qwen3"), load_weights=False, device="cpu", dtype=torch.float32)
        with pytest.raises(ConfigError, match="'acme/other' must be an existing folder or a repository"):
            add_adapters(models, "acme/other")
        made = add_adapters(models, "acme/lora")
        assert load_adapters(models, "acme/lora").num_tensors == len(made.names) == 8
        assert models[0].bridge_sources == (str(repository / "snapshots" / "abc"),) * 2


REFUSED = {
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "fan_in_fan_out": True,
    "init_lora_weights": "pissa_niter_4",
    "field_of_tomorrow": 1,
}
"""Further fields of a config whose adapter still fits."""


def attempt(folder, tensors, message, kind="own", **config):
    """The error when a folder is added; checks that nothing changed."""
    write(folder, {"r": 2, "target_modules": ["q_proj"], **config}, tensors)
    dims = ParallelDims()
    with rank_of(dims, 0, 1):
        chunks = build_model(experts.HF, dims=dims, load_weights=False, device="cpu", dtype=torch.float32)
        with pytest.raises(BridgeError, match=message) as caught:
            add_adapters(chunks, folder, kind=kind)
        assert not any("adapter" in name for name, _ in chunks[0].named_parameters())
        assert all(parameter.requires_grad for parameter in chunks[0].parameters())
    return str(caught.value)


def test_what_no_adapter_here_can_be_is_refused_by_name_all_at_once(tmp_path):
    foreign = {
        **{f"model.layers.1.mlp.gate.lora_{factor}.weight": torch.ones(2, 2) for factor in "AB"},
        **{f"lm_head.lora_{factor}.weight": torch.ones(2, 2) for factor in "AB"},
        "model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(2, 2),
        "model.visual.q_proj.lora_A.weight": torch.ones(3, 2),
        "model.embed_tokens.lora_embedding_A": torch.ones(2, 2),
        "model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(2),
    }
    text = attempt(tmp_path, foreign, "cannot be used", **REFUSED)
    for word in (*REFUSED, *(name.removesuffix(".weight").partition(".lora_")[0] for name in foreign)):
        assert word in text, word
    assert "model.visual.q_proj.lora_A.weight has rank 3, the config says 2" in text


def test_models_without_these_adapters_are_refused(tmp_path):
    folder_of(random_state(experts.HF), ["q_proj"], tmp_path, 2)
    write(tmp_path, {"r": 2, "target_modules": ["q_proj"]}, load_file(tmp_path / "adapter_model.safetensors"))
    dims = ParallelDims(pp=2, vp=2)
    hf = experts.HF.__class__.from_dict({**experts.HF.to_dict(), "num_hidden_layers": 4})
    with rank_of(dims, 0, 2):
        chunks = build_model(hf, dims=dims, load_weights=False, device="cpu", dtype=torch.float32)
        with pytest.raises(ConfigError, match="models must have adapters, found none: call add_adapters first"):
            load_adapters(chunks, tmp_path)
        made = add_adapters(chunks, rank=3, alpha=3, targets=["q_proj"])
        with pytest.raises(CheckpointError, match=r"has rank 2, the models 3: add adapters of that rank, or pass the"):
            load_adapters(chunks, tmp_path)
        with pytest.raises(MappingError, match=r"the chunks must have 2 more adapters, such as .*: pass all"):
            bind(chunks[:1], adapters=made)
        with pytest.raises(ConfigError, match=r"expected merged=True .*found merged=None"):
            bind(chunks)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    tensors = folder_of(random_state(experts.HF), ["q_proj"], tmp_path, 2)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    without = {own: tensor for own, tensor in tensors.items() if own != name}
    attempt(tmp_path, without, r"1 tensor missing \['model.layers.1.self_attn.q_proj.lora_A.weight")
    first = {own: tensor for own, tensor in tensors.items() if "layers.0." in own}
    layer = {"layers_to_transform": 0, "layers_pattern": "layers"}
    attempt(tmp_path, first, r"found 1 without, such as .*layers.1.self_attn.q_proj'\]: merge the adapter", **layer)
    attempt(tmp_path, tensors, "the config has no target for model.layers.1.self_attn.q_proj", **layer)
    attempt(tmp_path, tensors, "layers_to_transform must be the number of a layer", layers_to_transform=["0"])
    attempt(tmp_path, tensors, "target_parameters must be a list of experts", target_parameters=["mlp.gate.weight"])
    attempt(tmp_path, {**without, name: torch.ones(2, 3)}, r"q_proj.lora_A.weight has shape \(2, 3\)")
    attempt(
        tmp_path, {**without, name: torch.ones(2, 3, 1)}, r"q_proj.lora_A.weight of shape \(2, 3, 1\) is no factor: e"
    )
    attempt(tmp_path, {**without, name: tensors[name].double()}, "cannot hold all its values")
    attempt(tmp_path, tensors, "targets without tensors, such as .*v_proj", target_modules=["q_proj", "v_proj"])
    attempt(tmp_path, tensors, "the config has no target for model.layers.0", target_modules="k_proj")
    wrong = {"r": 0, "rank_pattern": {"(": 1}}
    attempt(tmp_path, tensors, "r must be an int of at least 1, found 0; rank_pattern must be ranks", **wrong)
    monkeypatch.setattr(peft_read, "SECONDS", 0.05)
    for field in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        endless = r"model(.|\w|_|[a-z])*!"
        value = endless if field.endswith("modules") else {endless: 1}
        attempt(
            tmp_path, tensors, r"patterns must be compared with all names in \S+ seconds, but .*!", **{field: value}
        )
    for wrong in (float("inf"), float("nan"), 10**400):
        attempt(tmp_path, tensors, "lora_alpha must be a finite number", lora_alpha=wrong)
    twice = {**tensors, name.removeprefix("base_model.model."): tensors[name].clone()}
    attempt(tmp_path, twice, "layers.1.self_attn.q_proj.lora_A.weight is there under another name too")
    attempt(tmp_path, {}, "has no adapter")
    attempt(tmp_path / "more", tensors, "has rank 2, the config says 3", r=3)
    two = folder_of(random_state(experts.HF), ["q_proj", "v_proj"], tmp_path, 2)
    message = r"2 differ.*layers.0.self_attn.v_proj.lora_A.*kind='own'"
    attempt(tmp_path, two, message, "shared", target_modules=["q_proj", "v_proj"])
    hf = zoo.cases()["deepseek_v3"].hf
    hf.num_nextn_predict_layers = 1  # transformers 4 has no field for it
    name = f"model.layers.{hf.num_hidden_layers}.self_attn.o_proj"
    write(tmp_path, {"r": 2, "target_modules": ["o_proj"]}, {f"{name}.lora_A.weight": torch.ones(2, 2)})
    with pytest.raises(BridgeError, match=f"{name} is in an MTP layer"):
        open_peft(tmp_path, provenance_of(hf), num_layers=hf.num_hidden_layers, num_experts=8)
    (tmp_path / "more" / "adapter_model.safetensors").unlink()
    with pytest.raises(
        BridgeError, match=r"expected adapter_model.safetensors in .*more, found none: save the adapter"
    ):
        open_peft(tmp_path / "more", provenance_of(experts.HF), num_layers=2, num_experts=8)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(BridgeError, match=r"name one of the adapters in it: \['more'\]"):
        open_peft(tmp_path, provenance_of(experts.HF), num_layers=2, num_experts=8)


def test_a_shared_adapter_computes_what_peft_does(tmp_path):
    hf, dims, found = tiny.config("qwen3"), ParallelDims(), []
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "o_proj"]
    folder_of(random_state(hf), targets, tmp_path / "peft", 2, kind="shared")
    model = tiny.random_model(hf)
    with rank_of(dims, 0, 1), torch.no_grad():
        for kind in ("own", "shared"):
            (chunk,) = build_model(hf, dims=dims, load_weights=model.state_dict(), device="cpu", dtype=torch.float32)
            add_adapters(chunk, tmp_path / "peft", kind=kind)
            tokens = batch()[:, :-1]
            found.append(chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None))
    expected = peft.PeftModel.from_pretrained(model, tmp_path / "peft")(batch()[:, :-1]).logits.detach()
    for logits in found:
        assert tiny.relative_error(logits[..., : hf.vocab_size], expected) < 1e-5


def places_of(tensor):
    """The rows and columns from which a slice of a numbered matrix was taken."""
    return (tensor[:, 0] // 1000).long(), (tensor[0] % 1000).long()


def test_a_rank_of_an_engine_gets_of_adapters_what_it_gets_of_weights(tmp_path):
    hf, dims, targets = tiny.config("qwen3"), ParallelDims(tp=2), ["q_proj", "v_proj", "up_proj", "down_proj"]
    state = random_state(hf)
    numbers = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    for tensor in numbers.values():
        if tensor.dim() == 2:
            tensor += torch.arange(len(tensor))[:, None] * 1000 + torch.arange(tensor.shape[1])
    whole = folder_of(state, targets, tmp_path, 2)
    weights = fake_mesh.build_everywhere(hf, dims, lambda chunks: load_hf_weights(chunks, numbers), dtype=torch.float32)
    adapters = fake_mesh.build_everywhere(hf, dims, lambda chunks: add_adapters(chunks, tmp_path), dtype=torch.float32)
    asked = [EngineRank(tp=8, tp_rank=3, pp=2, pp_rank=1, local_names=True), "nothing"]
    (taken, _), (found, nothing) = (fake_mesh.export_to(held, asked)[0] for held in (weights, adapters))
    assert not nothing
    assert len(found) == 2 * 2 * len(targets)
    for name, tensor in found.items():
        rows, columns = places_of(taken[f"{base_name(name)}.weight"])
        global_name = PeftNames().to_peft(re.sub(r"layers\.(\d)", lambda match: f"layers.{int(match[1]) + 2}", name))
        expected = whole[global_name]
        assert torch.equal(tensor, expected[:, columns] if "lora_A" in name else expected[rows]), name
        assert "q_proj.lora_B" not in name or len(tensor) == hf.head_dim


@pytest.mark.skipif("llava" not in towers.NAMES, reason="the installed transformers is too old")
def test_the_text_of_a_composite_has_adapters_under_the_names_that_peft_finds(tmp_path):
    """Modules of the tower have equal names, and prefixes in published files differ from transformers' in memory."""
    seeing.written("llava", tmp_path / "seen", num_hidden_layers=2)
    model, dims = seeing.reference(tmp_path / "seen"), ParallelDims()
    config = peft.LoraConfig(r=2, target_modules=r"model\.language_model\..*\.(q_proj|down_proj)")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "peft")
    with rank_of(dims, 0, 1):
        chunks = build_model(tmp_path / "seen", dims=dims, device="cpu", dtype=torch.float32)
        add_adapters(chunks, tmp_path / "peft")
        name, _ = next(iter_hf_adapters(chunks))
        assert name == "language_model.model.layers.0.self_attn.q_proj.lora_A.weight"
        save_hf_adapters(chunks, tmp_path / "ours")
    theirs, tensors = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("peft", "ours"))
    assert tensors.keys() == theirs.keys()
    name = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    of_tower = {f"{name}.lora_A.weight": torch.ones(2, 2), f"{name}.lora_B.weight": torch.ones(2, 2)}
    write(tmp_path / "tower", {"r": 2, "target_modules": ["q_proj", "down_proj"]}, theirs | of_tower)
    with pytest.raises(BridgeError, match=f"{name} is in the tower"):
        open_peft(tmp_path / "tower", provenance_of(tmp_path / "seen"), num_layers=2, num_experts=0)
    loaded = peft.PeftModel.from_pretrained(seeing.reference(tmp_path / "seen"), tmp_path / "ours")
    assert sum(".lora_" in name for name, _ in loaded.named_parameters()) == len(theirs) == 2 * 2 * 2
