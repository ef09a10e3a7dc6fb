"""vLLM in a process of its own, whose user has set one thing: the backend of its weight transfer."""

import json
import os
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path

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
SETTINGS = {
    "backend": {"weight_transfer_config": {"backend": "mcore_bridge"}},
    "extension": {"worker_extension_cls": "mcore_bridge.engines.vllm.Extension"},
}


def serve(address, setting, tensor_parallel, packs):
    """Handle rounds and prompts until the pipe ends. vLLM starts to listen at the address first.

    Args:
        packs: whether vLLM keeps its default kernels on CPUs, which pack weights out of reach of a map.
    """
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, _custom_ops

    from mcore_bridge.sync.clients import call_of

    if not packs:
        _custom_ops._supports_onednn = False
    folder = Path(tempfile.mkdtemp())
    fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **CONFIG}
    (folder / "config.json").write_text(json.dumps(fields))
    llm = LLM(
        model=str(folder),
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
        tensor_parallel_size=tensor_parallel,
        kv_cache_memory_bytes=1 << 26,
        **SETTINGS[setting],
    )
    call, asked = call_of(llm), SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with Listener(address) as listener, listener.accept() as pipe:
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            try:
                if isinstance(message, dict):
                    answer = call(message, 7)
                elif message == "version":
                    answer = llm.get_weight_version() if hasattr(llm, "get_weight_version") else "7"
                else:
                    answers = llm.generate([{"prompt_token_ids": row} for row in message], asked, use_tqdm=False)
                    rows = zip(message, (answer.prompt_logprobs[1:] for answer in answers), strict=True)
                    answer = [
                        [found[token].logprob for token, found in zip(row[1:], logs, strict=True)] for row, logs in rows
                    ]
            except Exception as error:
                answer = RuntimeError(str(error))
            pipe.send(answer)
