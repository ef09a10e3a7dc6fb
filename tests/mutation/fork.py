"""Runs some tests in a fork of a process that has imported torch, transformers and megatron-core, but not our code."""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

WARM = (
    *("torch", "numpy", "einops", "hypothesis", "pytest", "transformers", "accelerate", "safetensors.torch"),
    *(f"megatron.core.{name}" for name in ("models.gpt", "dist_checkpointing", "distributed", "optimizer")),
)
CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def warm() -> None:
    """Import the modules that do not change."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCH_COMPILE_DISABLE="1")
    for name in WARM:
        importlib.import_module(name)
    for name in CLASSES:
        getattr(sys.modules["transformers"], name)
    assert "mcore_bridge" not in sys.modules


def forked(tree: Path, limit: float, function: str, *arguments: Any) -> Any:
    """The result of a function of ``tests_of.py`` in a fork that works in ``tree``; None if it died or timed out."""
    answer = tree / ".answer"
    answer.unlink(missing_ok=True)
    if (process := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            _settle(tree)
            module = importlib.import_module("tests.mutation.tests_of")
            answer.write_text(json.dumps(getattr(module, function)(*arguments)))
        os._exit(0)
    deadline = time.monotonic() + limit
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # also the workers of the pool, and other processes of tests
        os.killpg(process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)
    return json.loads(answer.read_text()) if answer.exists() else None


def _settle(tree: Path) -> None:
    os.setsid()
    os.chdir(tree)
    log = os.open(tree / ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(Path(__file__).parents[2])))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "mcore_bridge")]:
        del sys.modules[name]
    main = sys.modules["__main__"]
    main.__spec__ = None
    vars(main).pop("__file__", None)  # workers would import it
