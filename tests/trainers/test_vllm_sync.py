"""A ``WeightSync`` into vLLM, whose user has named our backend: log-probs are the trainer's after every round.

Runs where vLLM's build for CPUs is installed, with our package and its entry points: docs/trainers/vllm.md says how.
"""

import importlib.util
import multiprocessing

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Qwen3Config

import mcore_bridge as mb
from tests.support import pool
from tests.support.stand_in import connected
from tests.workers.vllm_sync import CONFIG, DFLASH, DRAFT, EAGLE3, MOE, Client, serve

if importlib.util.find_spec("vllm") is None or torch.cuda.is_available():
    pytest.skip("needs vLLM, built for CPUs", allow_module_level=True)


def trained(address, setting):
    """What ``verify`` says after each round, and after a step of which vLLM has not heard; the ways that were taken."""
    dims = mb.ParallelDims(tp=2)
    dims.initialize(device="cpu")
    fields = {"qwen3_moe": MOE} if setting == "experts" else {"qwen3": CONFIG}
    ((kind, config),) = fields.items()
    hf = AutoConfig.for_model(kind, tie_word_embeddings=False, **config)
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=False)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, CONFIG["vocab_size"], (size,), generator=generator).tolist() for size in (20, 3, 50)]
    is_lead, apart = torch.distributed.get_rank() == 0, []
    engine = Client(connected(address)) if is_lead else ()
    with mb.WeightSync(models, engine) as sync:
        for step in range(4):
            for parameter in models[0].parameters():
                generator = torch.Generator().manual_seed(step)
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
            if step < 3:
                report = sync()
            # On CPUs vLLM 0.32 fails with log-probs if it has stages, and its experts differ from those of transformers
            verified = sync.verify([] if setting in ("stages", "experts") else prompts, weights=True)
            are_wrong = [worker.compared and len(worker.compared.wrong) > 0 for worker in verified.weights]
            apart.append(([found.worst.distance for found in verified.log_probs], are_wrong))
        if is_lead:
            assert engine.version() == "7"
    return apart, [(worker.transport, "no map" in worker.reason) for worker in report.workers]


@pytest.mark.parametrize(
    ("setting", "tensor_parallel", "packs", "ways"),
    [
        ("backend", 1, False, [("ring", False)]),
        ("backend", 2, True, [("ring", True)] * 2),
        ("extension", 1, False, [("ring", False)]),
        ("experts", 1, False, [("ring", False)]),
        ("stages", 1, False, [("ring", False)] * 2),
    ],
)
def test_one_setting_gives_the_trainers_log_probs(setting, tensor_parallel, packs, ways, tmp_path):
    address = str(tmp_path / "engine")
    arguments = (address, setting, tensor_parallel, packs)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
    process.start()
    (apart, found), other = pool.run(2, trained, address, setting)
    assert other == (apart, found)
    assert found == ways
    assert all(0 < distance < 1e-5 for distances, _ in apart[:3] for distance in distances), apart
    assert all(distance > 0.1 for distance in apart[3][0])
    assert [wrong for _, wrong in apart] == [[None if no_map else step > 2 for _, no_map in ways] for step in range(4)]
    process.join(60)
    process.kill()


def drafted(address, setting):
    """What a comparison finds after a round of the draft model and of the model, and a step of the draft model."""
    dims = mb.ParallelDims()
    dims.initialize(device="cpu")
    options = {"dims": dims, "dtype": torch.float32, "device": "cpu", "load_weights": False}
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=False, **CONFIG)
    pairs = [mb.build_model(config, **options)]
    if setting == "eagle3":
        pairs.append(mb.build_draft(pairs[0], LlamaConfig(**EAGLE3), token_ids=torch.arange(5, 5 + 96)))
    elif setting == "dflash":
        pairs.append(mb.build_draft(pairs[0], Qwen3Config(**DFLASH)))
    else:
        pairs.append(mb.build_model(AutoConfig.for_model("qwen3", tie_word_embeddings=False, **DRAFT), **options))
    for models in pairs:
        for parameter in models[0].parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    client = Client(connected(address))
    with mb.WeightSync(pairs[0], client, drafts=pairs[1]) as sync:
        assert [worker.target for worker in sync().workers] == ["draft", "policy"]
        for parameter in pairs[1][0].parameters():
            parameter.data.add_(1.0)
        verified = sync.verify(weights=True).weights
        if setting == "dflash":
            assert "DFlash" in sync().workers[0].reason
            weights, held = mb.to_hf_state_dict(pairs[1]), client.held_by_draft()
            layers = [f"layers.{number}.self_attn" for number in range(DFLASH["num_hidden_layers"])]
            fused = torch.cat([weights[f"{layer}.{name}_proj.weight"] for layer in layers for name in "kv"])
            assert torch.equal(held["_fused_kv_weight"], fused)
            assert torch.equal(held["_k_norm_weights"], torch.stack([weights[f"{at}.k_norm.weight"] for at in layers]))
            assert torch.equal(held["_hidden_norm_weight"], weights["hidden_norm.weight"])
            assert torch.equal(held["fc"], weights["fc.weight"])
            return [worker.compared for worker in verified[:1]]
    return [len({found.tensor for found in worker.compared.wrong}) for worker in verified]


@pytest.mark.parametrize(("setting", "num_changed"), [("draft", 2 * 8 + 3), ("eagle3", 10), ("dflash", None)])
def test_a_draft_model_gets_weights_of_its_own(setting, num_changed, tmp_path):
    address = str(tmp_path / "engine")
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(address, setting, 1, False))
    process.start()
    (wrong,) = pool.run(1, drafted, address, setting)
    # vLLM has eight parameters in a layer of Qwen3, and no map of a DFlash head
    assert wrong == ([num_changed, 0] if num_changed else [None])
    process.join(60)
    process.kill()
