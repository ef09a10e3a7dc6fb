"""Connections between a trainer and the workers of engines, over TCP, with a key that both sides must have."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from mcore_bridge.errors import TransferError, describe

KEY_BYTES = 32
HANDSHAKE = 5.0
"""Seconds that a worker has to prove that it has the key."""
_LOST = "expected a connection, found that the process has ended"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a trainer rank listens. Its fields are plain JSON."""

    host: str
    port: int
    key: str

    def dial(self) -> Connection:
        """Connect to the trainer rank.

        Raises:
            TransferError: when nobody listens there, or the key is another one.
        """
        try:
            return _prompt(Client((self.host, self.port), authkey=bytes.fromhex(self.key)))
        except (OSError, EOFError, AuthenticationError) as error:
            raise TransferError(
                f"expected a trainer that listens at {self.host}:{self.port}, found none ({error}). It may have ended; "
                "if the engine runs on another machine, pass WeightSync an address that this machine reaches"
            ) from None


class Listener:
    """Accepts workers of engines on a port of its own.

    Args:
        host: the name or the number under which the engines reach this machine.
    """

    def __init__(self, host: str) -> None:
        self._key = secrets.token_bytes(KEY_BYTES)
        try:
            self.socket = socket.create_server((host, 0), backlog=512)
        except OSError as error:
            raise TransferError(f"expected an address of this machine, found {host} ({error}); pass address=") from None
        self.address = Address(host, self.socket.getsockname()[1], self._key.hex())

    def accept(self, seconds: float) -> Connection | None:
        """The next worker; None if none came in time, or one came without the key."""
        self.socket.settimeout(seconds)
        try:
            accepted, _ = self.socket.accept()
        except TimeoutError:
            return None
        accepted.settimeout(None)
        _limit_reads(accepted, HANDSHAKE)  # another program may connect, and never answer
        pipe = Connection(accepted.detach())
        try:
            deliver_challenge(pipe, self._key)
            answer_challenge(pipe, self._key)
            with socket_of(pipe) as same:
                _limit_reads(same, 0)
            return _prompt(pipe)
        except (OSError, EOFError, AuthenticationError):
            pipe.close()
            return None

    def close(self) -> None:
        """Accept nobody any more."""
        self.socket.close()


def tell(pipe: Connection, message: object) -> None:
    """Send a message that the other side takes by ``pipe.recv()``.

    ``pipe.send`` lends a buffer of its own to the system. If the other side has ended, an exception keeps this buffer,
    and Python 3.12.1 crashes when it collects it as garbage.
    """
    pipe.send_bytes(pickle.dumps(message))


def socket_of(pipe: Connection) -> socket.socket:
    """The socket of a connection, to be closed without the connection."""
    return socket.socket(fileno=os.dup(pipe.fileno()))


def has_ended(pipe: Connection) -> bool:
    """Whether the process behind a connection has ended. What it has sent is not read."""
    try:
        with socket_of(pipe) as same:
            return same.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _prompt(pipe: Connection) -> Connection:
    """Send small messages at once. By default TCP holds the second of two back for up to 40 ms."""
    with socket_of(pipe) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return pipe


def _limit_reads(connection: socket.socket, seconds: float) -> None:
    """Let reads fail after some seconds; 0 is never."""
    whole, part = int(seconds), int(seconds % 1 * 1e6)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, part))


def own_host() -> str:
    """The number under which other machines reach this one, as far as it is known."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # a datagram socket only chooses a route: nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"


class WorkerLine:
    """Questions to one worker of an engine, and its answers.

    Args:
        pipe: the connection.
        worker: what messages call the worker.
        seconds: how long an answer may take.
    """

    def __init__(self, pipe: Connection, worker: str, seconds: float) -> None:
        self.pipe, self.worker, self.seconds = pipe, worker, seconds

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Ask, and wait for the answer."""
        self.send(method, arguments)
        return self.answer()

    def send(self, method: str, arguments: Sequence[Any] = ()) -> None:
        """Ask for a method of the worker."""
        try:
            tell(self.pipe, (method, tuple(arguments)))
        except OSError as error:
            raise TransferError(f"{self.worker}: {_LOST}") from error

    def answer(self) -> Any:
        """The next answer.

        Raises:
            TransferError: when the worker reports an error, has ended, or does not answer in time. A worker that was
                silent is not asked again.
        """
        try:
            if not self.pipe.poll(self.seconds):
                self.pipe.close()  # a late answer would be taken for the answer to a later question
                raise TransferError(
                    f"{self.worker}: expected an answer within {self.seconds:.0f} s, found none; look into its log, or "
                    "pass a longer timeout"
                )
            answer = self.pipe.recv()
        except (OSError, EOFError) as error:
            raise TransferError(f"{self.worker}: {_LOST}") from error
        if isinstance(answer, Exception):
            raise TransferError(f"{self.worker}: {answer}") from answer
        return answer

    def failed(self, error: Exception) -> TransferError:
        """The error of this worker after a failure of all: that the worker has ended, or else ``error``."""
        ended = not self.pipe.closed and has_ended(self.pipe)
        return TransferError(f"{self.worker}: {_LOST}" if ended else describe(error))
