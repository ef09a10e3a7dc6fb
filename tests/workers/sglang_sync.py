"""SGLang's engine on CPU, in a process of its own. torch computes, since SGLang's compiled kernels are not there."""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path

from tests.workers.sglang_engine import prepare
from tests.workers.vllm_sync import CONFIG, MOE, folder_of

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {
    "one": (CONFIG, {}),
    "two": (CONFIG, {"tp_size": 2}),
    "stages": (CONFIG, {"pp_size": 2}),
    "experts": (MOE, {"tp_size": 2, "ep_size": 2}),
}
"""The model, and SGLang's arguments."""
ALWAYS = {
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
    "log_level": "warning",
}
"""SGLang's arguments on a CPU and on a GPU."""
REPLACED = "from tests.workers import sglang_engine\n\nsglang_engine.prepare()\n"
"""What SGLang's schedulers import as ``sgl_kernel``."""


def serve(address, setting):
    """Handle rounds and prompts until the pipe ends. SGLang starts first, and then listens at the address."""
    prepare()
    config, arguments = SETTINGS[setting]
    kernels = tempfile.mkdtemp()
    Path(kernels, "sgl_kernel.py").write_text(REPLACED)
    size = arguments.get("tp_size", 1) * arguments.get("pp_size", 1)
    sys.path[:0] = [kernels, str(ROOT)]  # SGLang's processes begin with the same
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * size)  # by default each rank has a NUMA node
    import sglang

    from mcore_bridge.engines.sglang import LOAD, client

    engine = sglang.Engine(
        model_path=folder_of(config),
        custom_weight_loader=[LOAD],
        load_format="dummy",
        dtype="float32",
        device="cpu",
        attention_backend="torch_native",
        disable_overlap_schedule=True,
        max_total_tokens=1024,
        context_length=256,
        **ALWAYS,
        **arguments,
    )
    answer(engine, client(engine), address)


def serve_on_gpu(address, folder):
    """As ``serve``, but with SGLang's kernels, and with the weights of a folder."""
    import sglang

    from mcore_bridge.engines.sglang import LOAD, client

    engine = sglang.Engine(
        model_path=folder,
        custom_weight_loader=[LOAD],
        dtype="bfloat16",
        attention_backend="triton",
        moe_runner_backend="triton",
        fp8_gemm_runner_backend="triton",
        max_total_tokens=16384,
        context_length=512,
        disable_custom_all_reduce=True,
        **ALWAYS,
    )
    answer(engine, client(engine), address)


def answer(engine, call, address):
    """Listen at the address, and handle what comes."""
    with Listener(address) as listener, listener.accept() as pipe, ThreadPoolExecutor(1) as rounds:
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                break
            try:
                if message == "version":
                    said = engine.get_model_info()["weight_version"]
                elif isinstance(message, dict):  # in another thread, as ``WeightSync`` calls it
                    said = rounds.submit(call, message, 7).result()
                else:
                    said = call.log_probs(message)
            except Exception as error:
                said = RuntimeError(str(error))
            pipe.send(said)
    engine.shutdown()
