"""The engine of an example in another process, with weights that the trainer sends in the slots of a ring."""

import multiprocessing
import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).parent.parent.parent / "examples")
sys.path[:0] = [EXAMPLES] if EXAMPLES not in sys.path else []

from engine_process import ask, serve  # noqa: E402
from vllm_engine import VllmEngine as VllmEngine  # noqa: E402


class RemoteEngine:
    """``make_engine(*arguments)``; its methods are called by name."""

    def __init__(self, make_engine, *arguments):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_engine, arguments))
        self._process.start()
        theirs.close()

    def __call__(self, method, *arguments):
        return ask(self._pipe, method, *arguments)

    def sync(self, ring, pairs):
        """Hand all weights on, in the slots of ``ring``."""
        for bucket in ring.fill(pairs, acknowledged=self._answer):
            self._pipe.send(("load", bucket.number))
        self("finish")

    def _answer(self):
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer

    def close(self):
        """End the process."""
        self._pipe.close()
        self._process.join(30)
        self._process.terminate()


def _serve(pipe, make_engine, arguments):
    """In a process that has imported this module, and so knows where the examples are."""
    serve(pipe, make_engine, arguments)
