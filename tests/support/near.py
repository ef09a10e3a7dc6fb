"""A trainer and the worker of an engine in one process."""

import pickle

from mcore_bridge.errors import TransferError


class Near:
    """A line to a worker in this process, which answers in the order of the questions. They are sent as bytes."""

    def __init__(self, worker):
        self.worker, self.answers = worker, []

    def send(self, method, arguments=()):
        self.answers.append(self.worker._answer(method, pickle.loads(pickle.dumps(arguments))))

    def answer(self):
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise TransferError(f"worker: {found}") from found
        return found
