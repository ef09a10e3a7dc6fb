"""An engine in FP8 or in four bits follows a trainer on a GPU for some steps."""

import multiprocessing

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

import mcore_bridge as mb
from tests.support.gpus import ask_for
from tests.support.stand_in import connected
from tests.support.strategies import random_state, tiny
from tests.workers.vllm_sync import Client

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 4,
}
"""Sizes that blocks and groups divide, as vLLM wants them."""
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 256}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
STEPS = 5


def of_prompts(models, prompts):
    """Log-probs of the trainer's model [batch, seq - 1]."""
    return mb.forward(models, prompts.cuda()).log_probs[:, 1:].cpu()


def together(models):
    """Move all parameters into one allocation, as megatron-core's DDP does for its distributed optimizer."""
    parameters = [*models[0].parameters()]
    joined = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, own in zip(parameters, joined.split([*map(torch.Tensor.numel, parameters)]), strict=True):
        parameter.data = own.view_as(parameter)


def compare(client, models, rounded, transport, times, held):
    """Rounds of a model into an engine, beside a model with the weights that the engine should have."""
    prompts = torch.randint(0, 1024, (8, 100))
    from_files, found = held(client) if held else None, []
    first = {name: parameter.clone() for name, parameter in models[0].named_parameters()}
    together(models)
    way = transport if transport == "pull" else None  # which only engines need whose memory nobody can open
    with mb.WeightSync(models, client, quantize="as_published", transport=way) as sync:
        for step in range(STEPS + 2):
            for number, (name, parameter) in enumerate(models[0].named_parameters()):
                generator = torch.Generator("cuda").manual_seed(1000 * step + number)
                noise = torch.randn(parameter.shape, generator=generator, device="cuda") * parameter.float().std()
                parameter.data.copy_(first[name] if step > STEPS else parameter + 0.3 * noise)
            if step:
                found.append(sync.verify(prompts).log_probs[0].mean)
            report = sync()
            assert [worker.transport for worker in report.workers] == [transport]
            compared = sync.verify(weights=True).weights[0].compared
            assert (transport == "ring" and compared is None) or not compared.wrong, compared.wrong
            mb.load_hf_weights(rounded, mb.to_hf_state_dict(models, quantize="as_published"))
            own, theirs = of_prompts(models, prompts), of_prompts(rounded, prompts)
            engine = sync.verify(prompts).log_probs[0].mean
            allowed = float((own - theirs).abs().mean())
            print(f"step {step}: engine {engine:.4f}, rounded weights {allowed:.4f}, a step before {found[-1:]}")
            if step <= STEPS:
                assert 0 < engine < times * allowed
                assert not step or found[-1] > times * allowed
    assert held is None or held(client) == from_files


def follow(rollout, tmp_path, serve, *arguments, held=None):
    """Check rounds into an engine that has loaded the published folder, and log-probs after each step.

    Args:
        rollout: family, sizes, format, the way to the engine, and how many times the error of rounded weights is
            allowed.
        serve, arguments: run in the engine's process, between the address and the folder.
        held: asks a ``Client`` for the engine's weights, if the engine can say them.
    """
    ask_for(1)
    mb.ParallelDims().initialize(device="cuda")
    kind, sizes, scheme, transport, times = rollout
    hf, options = (
        tiny(kind, **WIDE, **sizes, architectures=[CLASSES[kind]]),
        {"dims": mb.ParallelDims(), "dtype": torch.bfloat16},
    )
    source = mb.build_model(hf, **options, load_weights=False)
    mb.load_hf_weights(source, random_state(hf, dtype=torch.bfloat16))
    folder = str(tmp_path / "published")
    mb.save_hf_checkpoint(source, folder, quantize=scheme)
    models, rounded = (mb.build_model(folder, **options) for _ in range(2))
    address = str(tmp_path / "engine")
    args = (address, *arguments, folder)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=args)
    process.start()
    try:
        compare(Client(connected(address)), models, rounded, transport, times, held)
    finally:
        process.kill()
