"""vLLM in a process of its own, whose user has set one thing: the backend of its weight transfer."""

import json
import os
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

from tests.support import eagle3

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
"""The config of an EAGLE3 head for the policy of ``CONFIG``."""

MOE = {**CONFIG, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": []}


def folder_of(config, policy=None):
    """A folder with a config alone, or with an EAGLE3 head for the config of a policy."""
    folder = Path(tempfile.mkdtemp())
    if policy is not None:
        head = eagle3.random_head(config, SimpleNamespace(**policy), own_embedding=False)
        return eagle3.write(folder, config, head)
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

    def version(self):
        return self._ask("version")


BACKEND = {"weight_transfer_config": {"backend": "mcore_bridge"}}
DRAFTS = {"draft": ("draft_model", DRAFT), "eagle3": ("eagle3", EAGLE3)}
SETTINGS = {
    "backend": BACKEND,
    "draft": BACKEND,
    "eagle3": BACKEND,
    "experts": BACKEND,
    "stages": BACKEND | {"pipeline_parallel_size": 2},
    "extension": {"worker_extension_cls": "mcore_bridge.engines.vllm.Extension"},
}


def serve(address, setting, tensor_parallel, packs):
    """Handle rounds and prompts until the pipe ends. vLLM starts to listen at the address first.

    Args:
        packs: whether vLLM keeps its default kernels on CPUs, which pack weights out of reach of a map.
    """
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, _custom_ops

    from mcore_bridge.engines.vllm import log_probs, receive

    options = dict(SETTINGS[setting])
    if not packs:
        options.setdefault("worker_extension_cls", "tests.workers.unpacked.Unpacked")
        _custom_ops._supports_onednn = False
    if setting in DRAFTS:
        method, config = DRAFTS[setting]
        draft = {"method": method, "num_speculative_tokens": 2}
        draft["model"] = folder_of(config, CONFIG if setting == "eagle3" else None)
        if setting == "eagle3":  # a head without weights would use the output layer of the policy
            draft["draft_load_config"] = {"load_format": "safetensors"}
        options["speculative_config"] = draft
    llm = LLM(
        model=folder_of(MOE if setting == "experts" else CONFIG),
        dtype="float32",
        load_format="dummy",
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
                elif message == "version":
                    answer = llm.get_weight_version() if hasattr(llm, "get_weight_version") else "7"
                else:
                    answer = log_probs(llm, message)
            except Exception as error:
                answer = RuntimeError(str(error))
            pipe.send(answer)
