"""vLLM in a process of its own, whose user has set one thing: the backend of its weight transfer."""

import json
import os
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

from mcore_bridge.weights.engine.prove import checksums
from tests.support import dflash, eagle3

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


DRAFT = {**CONFIG, "num_hidden_layers": 2}

EAGLE3 = {**CONFIG, "num_hidden_layers": 1, "draft_vocab_size": 96, "model_type": "llama", "tie_word_embeddings": False}
EAGLE3 |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
POLICY = SimpleNamespace(**CONFIG)
DFLASH = dflash.fields_of(
    POLICY,
    dflash_config={"mask_token_id": 255, "target_layer_ids": [0, 1, 2]},
    head_dim=32,
    max_position_embeddings=512,
    num_key_value_heads=4,
)

MOE = {**CONFIG, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": []}


def written(config, state):
    """A folder with a head and its weights."""
    return eagle3.write(Path(tempfile.mkdtemp()), config, state)


def held(worker):
    """A checksum of each parameter."""
    return checksums(dict(worker.get_model().named_parameters()))


def folder_of(config):
    """A folder with a config alone."""
    folder = Path(tempfile.mkdtemp())
    kind = "Qwen3Moe" if "num_experts" in config else "Qwen3"
    fields = {"model_type": kind.lower().replace("moe", "_moe"), "architectures": [f"{kind}ForCausalLM"]} | config
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


class Client:
    """What the trainer's rank 0 has of that process."""

    def __init__(self, pipe):
        self._pipe = pipe

    def _ask(self, message):
        self._pipe.send(message)
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __call__(self, info):
        self._ask(dict(info))

    def draft(self, info):
        self._ask(("draft", dict(info)))

    def log_probs(self, prompts):
        return self._ask(prompts)

    def held(self):
        return self._ask("held")

    def held_by_draft(self):
        return self._ask("held by draft")

    def version(self):
        return self._ask("version")


BACKEND = {"weight_transfer_config": {"backend": "mcore_bridge"}}
DRAFTS = {
    "draft": ("draft_model", lambda: folder_of(DRAFT)),
    "eagle3": ("eagle3", lambda: written(EAGLE3, eagle3.random_head(EAGLE3, POLICY, own_embedding=False))),
    "dflash": ("dflash", lambda: written(DFLASH, dflash.random_head(DFLASH))),
}
SETTINGS = {
    "backend": BACKEND,
    "draft": BACKEND,
    "eagle3": BACKEND,
    "dflash": BACKEND,
    "experts": BACKEND,
    "stages": BACKEND | {"pipeline_parallel_size": 2},
    "extension": {"worker_extension_cls": "mcore_bridge.engines.vllm.Extension"},
}


def held_by_draft(worker):
    """The tensors of a DFlash head that its loader has made of others, and one of them."""
    model = worker.get_draft_model().model
    names = "_fused_kv_weight", "_hidden_norm_weight", "_k_norm_weights"
    return {name: getattr(model, name) for name in names} | {"fc": model.fc.weight.data}


def serve(address, setting, tensor_parallel, packs, folder=None):
    """Handle rounds and prompts until the pipe ends. vLLM starts to listen at the address first.

    Args:
        packs: whether vLLM keeps its default kernels on CPUs, which pack weights out of reach of a map.
        folder: a checkpoint that vLLM loads on a GPU. None: random weights, on a CPU.
    """
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_USE_DEEP_GEMM="0")
    from vllm import LLM, _custom_ops

    from mcore_bridge.engines.vllm import log_probs, receive

    options = dict(SETTINGS[setting])
    if not packs:
        options.setdefault("worker_extension_cls", "tests.workers.unpacked.Unpacked")
        _custom_ops._supports_onednn = False
    if setting in DRAFTS:
        method, folder = DRAFTS[setting]
        draft = {"method": method, "num_speculative_tokens": 2, "model": folder()}
        if setting != "draft":  # a head without weights would use the output layer of the policy
            draft["draft_load_config"] = {"load_format": "safetensors"}
        options["speculative_config"] = draft
    on_cpu = {"dtype": "float32", "load_format": "dummy"}
    llm = LLM(
        model=folder or folder_of(MOE if setting == "experts" else CONFIG),
        **({"dtype": "bfloat16"} if folder else on_cpu),
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
        tensor_parallel_size=tensor_parallel,
        kv_cache_memory_bytes=1 << 26,
        **options,
    )
    with Listener(address) as listener, listener.accept() as pipe:
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            try:
                if isinstance(message, dict):
                    answer = receive(llm, message, 7)
                elif isinstance(message, tuple):
                    answer = receive(llm, message[1], 7, draft=True)
                elif message == "held by draft":
                    head = llm.collective_rpc(held_by_draft)[0]
                    answer = {name: tensor.clone() for name, tensor in head.items()}
                elif message == "held":
                    (answer,) = llm.collective_rpc(held)
                elif message == "version":
                    answer = llm.get_weight_version() if hasattr(llm, "get_weight_version") else "7"
                else:
                    answer = log_probs(llm, message)
            except Exception as error:
                answer = RuntimeError(str(error))
            pipe.send(answer)
