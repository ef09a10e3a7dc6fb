"""Each kind of client reaches the workers of its engine; what is none is refused, and an engine that fails is named."""

import asyncio
import gc
import importlib
import json
import multiprocessing
import socket
import threading
import tomllib
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from importlib.metadata import EntryPoint
from multiprocessing.connection import Client
from pathlib import Path
from socketserver import ThreadingTCPServer
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.engines import EngineWorker, channel, sglang
from mcore_bridge.engines.engine_worker import worker_name
from mcore_bridge.engines.vllm import Draft
from mcore_bridge.errors import TransferError
from mcore_bridge.sync.clients import call_of
from tests.support import mtp_checkpoints, pool
from tests.support.strategies import tiny

HEAD = "lm_head.weight"


def model_and_worker(hf=None, **options):
    dims = mb.ParallelDims()
    dims.initialize(device="cpu")
    hf = hf or tiny("qwen3", tie_word_embeddings=False)
    models = mb.build_model(hf, dims=dims, device="cpu", load_weights=False, **options)
    head = torch.nn.Linear(hf.hidden_size, hf.vocab_size, bias=False)
    load = lambda pairs: head.weight.data.copy_(dict(pairs)[HEAD])  # noqa: E731
    return models, head.weight, EngineWorker(head, load, name="a head, worker 0 of 1")


def completions(body):
    """What vLLM answers if every token has a log-probability that is its id, negated."""
    assert body == {"prompt": body["prompt"], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    rows = [[None, *({str(token): {"logprob": -token, "rank": 1}} for token in row[1:])] for row in body["prompt"]]
    choices = [{"index": number, "prompt_logprobs": row} for number, row in enumerate(rows)]
    return {"choices": choices[::-1]} if len(rows) > 1 else {"choices": [{"index": 0, "text": ""}]}


@contextmanager
def server(receive, calls, broken=()):
    """A server with the routes of vLLM's."""

    class Routes(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append((self.path, body.get("weight_version")))
            if self.path in broken:
                self.send_error(500, "no such weights")
                return
            if self.path == "/update_weights":
                receive(body["update_info"])
            self.send_response(200)
            self.end_headers()
            if self.path == "/v1/completions":
                self.wfile.write(json.dumps(completions(body)).encode())

        def log_message(self, *arguments):
            pass

    with ThreadingTCPServer(("127.0.0.1", 0), Routes) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}/"
        http.shutdown()
        thread.join()


class FourMethods:
    """A client with the four methods of vLLM's clients."""

    def __init__(self, receive, calls):
        self._receive, self._calls = receive, calls

    def init_weight_transfer_engine(self, init_info):
        raise AssertionError("there is nothing to begin")

    def start_weight_update(self):
        self._calls.append(("/start_weight_update", None))

    def start_draft_weight_update(self):
        self._calls.append(("/start_draft_weight_update", None))

    def update_weights(self, update_info):
        self._calls.append(("/update_weights", None))
        self._receive(json.loads(json.dumps(update_info)))

    def finish_weight_update(self, weight_version=None):
        self._calls.append(("/finish_weight_update", weight_version))


class OlderClient(FourMethods):
    """As before vLLM 0.27."""

    def finish_weight_update(self):
        super().finish_weight_update()


def reached(kind):
    models, weight, worker = model_and_worker()
    calls = []
    expected = mb.to_hf_state_dict(models)[HEAD]
    assert not torch.equal(weight, expected)
    wrapped = Draft if "draft" in kind else lambda engine: engine
    if "server" in kind:
        with server(worker.receive, calls) as address, mb.WeightSync(models, wrapped(address), timeout=30) as sync:
            sync(12)
    elif "client" in kind:
        client = (OlderClient if "older" in kind else FourMethods)(worker.receive, calls)
        with mb.WeightSync(models, [wrapped(client)], timeout=30) as sync:
            sync(12)
    elif kind == "pipe":
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=lambda: theirs.send(worker.receive(theirs.recv())))
        thread.start()
        with mb.WeightSync(models, ours, timeout=30) as sync:
            sync(12)
        thread.join()
    assert torch.equal(weight, expected)
    return calls


def asked():
    """Log-probs of prompts, by the server's address or by a client that has it."""
    models, _, _ = model_and_worker()
    said = []
    with server(None, []) as address, mb.WeightSync(models, timeout=30) as sync:
        client = FourMethods(None, [])
        client.base_url = address
        for engine in (address, client):
            sync.set_engines(engine)
            (found,) = sync.verify([[1, 2, 3], [4, 5]]).log_probs
            said.append([(token.token, token.engine) for token in found.tokens])
            with pytest.raises(TransferError, match="expected log-probs of prompts from the server"):
                sync.verify([[1, 2, 3]])
    return said


def in_a_group():
    models, weight, worker = model_and_worker()
    others = model_and_worker()[0]
    syncs = [mb.WeightSync(own, worker.receive, transport="network", timeout=30) for own in (models, others)]

    def run(number):
        own = (models, others)[number]
        for parameter in own[0].parameters():
            parameter.data.normal_()
        syncs[number]()
        return torch.equal(weight, mb.to_hf_state_dict(own)[HEAD])

    found = [run(0), run(1), run(0), run(1), run(0)]
    head = models[0].output_layer.weight
    head.untyped_storage().resize_(0)
    with pytest.raises(TransferError, match=r"output_layer.* has no storage"):
        syncs[0]()
    head.untyped_storage().resize_(head.nbytes)
    found += [run(0), run(1)]
    for sync in syncs:
        sync.close()
    return found


def test_two_trainers_share_a_worker_elsewhere_and_go_on_after_a_round_that_failed():
    assert pool.run(1, in_a_group) == [[True] * 7]


def test_a_server_is_asked_for_log_probs():
    (said,) = pool.run(1, asked)
    assert said == [[(2, -2.0), (3, -3.0), (5, -5.0)]] * 2


@pytest.mark.parametrize("kind", ["server", "draft of a server", "client", "older client", "draft of a client", "pipe"])
def test_each_kind_of_client_brings_a_round_to_its_workers(kind):
    (calls,) = pool.run(1, reached, kind)
    three = [("/start_weight_update", None), ("/update_weights", None), ("/finish_weight_update", "12")]
    caches = [(f"/reset_{name}_cache", None) for name in ("prefix", "mm", "encoder")]
    if "older" in kind:
        three[2] = ("/finish_weight_update", None)
    if "draft" in kind:  # its version is the version of the policy
        three[::2] = ("/start_draft_weight_update", None), ("/finish_weight_update", None)
    assert calls == (three + caches if "server" in kind else three if "client" in kind else [])


def failing():
    models, weight, worker = model_and_worker()
    with mb.WeightSync(models, timeout=30) as sync:
        assert str(sync()).endswith("s: no engines, nothing sent")
        assert str(sync.verify(weights=True)) == "version 1, no engines: nothing compared"

        def raised(engines):
            sync.set_engines(engines)
            with pytest.raises(TransferError) as caught:
                sync()
            return str(caught.value)

        found = {
            "returns": raised(lambda info: None),
            "raises": raised([worker.receive, lambda info: 1 // 0]),
            "nobody": raised("http://127.0.0.1:9"),
        }
        assert torch.equal(weight, mb.to_hf_state_dict(models)[HEAD])  # the weight of the engine that did not raise
        channel.HANDSHAKE = 0.2
        address = sync._listener.address
        with socket.create_connection((address.host, address.port)) as scanner, closing(Client(scanner.getpeername())):
            sync.set_engines(worker.receive)  # programs without a key connect at once
            sync()
        with server(worker.receive, [], broken=("/finish_weight_update",)) as address:
            found["500"] = raised(address)

        def spoil(pairs):
            raise ZeroDivisionError

        for source, load in ((3, spoil), (torch.nn.Linear(1, 1), None)):
            with pytest.raises(TransferError, match=r"(source|load) must be .*, found (3|None): pass "):
                EngineWorker(source, load, name="spoilt")
        found["loads"] = raised(EngineWorker(torch.nn.Linear(1, 1), spoil, name="spoilt").receive)
        wrong = {3: "expected an engine: vLLM's LLM", "node7:8000": "write http://node7:8000$", "": "such as http"}
        with pytest.raises(TransferError, match="found engine 2 of the list once more"):
            sync.set_engines([worker.receive, print, worker.receive])
        for engine, match in {**wrong, Draft(3): r"with a draft model: .* method draft\(info\); found 3$"}.items():
            with pytest.raises(TransferError, match=match):
                sync.set_engines(engine)
        late = mb.WeightSync(models, transport="network", timeout=0.5)
        with late:
            late.set_engines(lambda info: threading.Event().wait(2))
            with pytest.raises(TransferError, match="0 of its workers came within"):
                late()
        sync.set_engines(worker.receive)
        assert sync.version < sync().version
        nobody = {"address": {"host": "127.0.0.1", "port": 9, "key": "ab"}, "engine": 0, "seconds": 1}
        for info, match in (({}, "expected what a WeightSync has sent"), (nobody, "expected a trainer that listens")):
            with pytest.raises(TransferError, match=match):
                worker.receive(info)
    return found


def test_an_engine_that_fails_is_named_with_its_cause():
    (found,) = pool.run(1, failing)
    expected = {
        "returns": "engine 0: its call returned, and 0 workers had come: every worker of the engine must hand info to",
        "raises": "engine 2: ZeroDivisionError",
        "nobody": "engine 3: expected a vLLM server at http://127.0.0.1:9, found none",
        "500": "finish_weight_update answered 500",
    }
    assert {kind for kind, text in expected.items() if text not in found[kind]} == set(), found
    assert {kind for kind, text in found.items() if "may be half old and half new" in text} == {"500", "loads"}
    assert found["loads"].count("spoilt") == 1


def refused():
    models, _, worker = model_and_worker()
    rank, found = dist.get_rank(), []
    for wrong in ({"timeout": (5, 0)}, {"transport": (None, "shard")}, {"engines": (3, ())}, {"address": (None, 7)}):
        ((name, values),) = wrong.items()
        with pytest.raises(TransferError) as caught:
            mb.WeightSync(models, **{"engines": (), name: values[rank]})
        found.append(str(caught.value))
    with pytest.raises(TransferError, match="expected drafts on all ranks or on none, found them on 1 of 2"):
        mb.WeightSync(models, drafts=models if rank == 1 else None)
    with mb.WeightSync(models, worker.receive if rank == 0 else ()) as sync:
        if rank == 1:
            with pytest.raises(TransferError, match="expected rank 0 to name the engines, found rank 1"):
                sync.set_engines(())
        sync()
        with pytest.raises(TransferError, match="version must be a whole number of at least 0"):
            sync("latest" if rank == 0 else 7)
        assert sync(4 if rank == 0 else 9).version == sync.version == 4
    for use in (sync, lambda: sync.verify([[1, 2]], [[0.0]]), lambda: sync.set_engines(())):
        with pytest.raises(TransferError, match="expected an open WeightSync, found a closed one: make a new one"):
            use()
    sync.close()
    return found


def test_an_engine_that_has_ended_harms_no_trainer_that_keeps_the_error():
    def tell_nobody():
        ours, theirs = multiprocessing.Pipe()
        theirs.close()
        try:
            call_of(ours)({"name": "value"}, 1)
        except BrokenPipeError as error:
            kept = error  # a circle: the frame, the error, its traceback
            return type(kept)

    for _ in range(50):
        assert tell_nobody() is BrokenPipeError
        gc.collect()  # Python 3.12.1 crashes here if a connection's own buffer is among the garbage


def test_all_ranks_refuse_what_one_of_them_cannot_take():
    first, second = pool.run(2, refused)
    assert first == second
    for text, part in zip(
        first, ("timeout must be", "transport must be one of", "expected an engine", "address"), strict=True
    ):
        assert part in text
    with pytest.raises(TransferError, match="found 7"):
        call_of(7)


class TwoModels(FourMethods):
    """A client of vLLM's whose engine has a draft model, too. Each of both has one weight."""

    def __init__(self, shape):
        self.weights = {name: torch.zeros(shape) for name in ("policy", "draft")}
        self.calls, self.broken = [], ""
        self._workers = {
            name: EngineWorker(lambda held={HEAD: weight}: held, self._loader(name), name=f"{name} of two")
            for name, weight in self.weights.items()
        }
        super().__init__(self._receive_either, self.calls)

    def _loader(self, name):
        def load(pairs):
            if name == self.broken:
                raise ZeroDivisionError
            self.weights[name].copy_(dict(pairs)[HEAD])

        return load

    def _receive_either(self, info):
        is_draft = next(path for path, _ in self.calls[::-1] if "start" in path).startswith("/start_draft")
        self._workers["draft" if is_draft else "policy"].receive(info)

    def versions(self):
        """What it has called its weights since it was asked last."""
        found = [version for path, version in self.calls if version]
        self.calls.clear()
        return found


def together():
    models, _, _ = model_and_worker()
    drafts, _, _ = model_and_worker()
    heads = {"policy": models[0].output_layer.weight, "draft": drafts[0].output_layer.weight}
    first, second = (TwoModels(heads["policy"].shape) for _ in range(2))
    found = {}

    def step(number):
        for seed, head in enumerate(heads.values()):
            generator = torch.Generator().manual_seed(number * 2 + seed)
            head.data.copy_(torch.randn(head.shape, generator=generator))

    def held(engine):
        return [name for name, weight in engine.weights.items() if torch.equal(weight, heads[name].float())]

    with mb.WeightSync(models, [first, second], drafts=drafts, loads=True, timeout=30) as sync:
        for number, broken in enumerate(("", "draft", "policy", ""), 1):
            step(number)
            first.broken = broken
            try:
                report = sync()
            except TransferError as error:
                found[broken] = str(error)
            else:
                targets = [(worker.target, worker.engine) for worker in report.workers]
                assert targets == [("draft", 0), ("draft", 1), ("policy", 0), ("policy", 1)]
                assert "2 workers, 0.00 GB by ring; 2 workers of draft models, 0.00 GB by ring" in str(report)
                started = [path for path, _ in first.calls if "start" in path]
                assert started == ["/start_draft_weight_update", "/start_weight_update"]
            assert held(first) == {"": ["policy", "draft"], "draft": [], "policy": ["draft"]}[broken]
            assert first.versions() == ([] if broken else [str(sync.version)])
            assert held(second) == ["policy", "draft"]
            assert second.versions() == [str(number)]
        verified = sync.verify(weights=True).weights
        assert [worker.target for worker in verified] == ["draft", "draft", "policy", "policy"]
    with pytest.raises(TransferError, match="drafts=models means MTP layers of these models, found none: build them"):
        mb.WeightSync(models, first, drafts=models)
    models, _, _ = model_and_worker(mtp_checkpoints.config("deepseek_v3"), overrides={"mtp_num_layers": 1})
    heads["policy"] = models[0].output_layer.weight
    first, second = (TwoModels(heads["policy"].shape) for _ in range(2))
    with mb.WeightSync(models, [first, second], drafts=models, timeout=30) as sync:
        step(0)
        sync()
        assert torch.equal(second.weights["draft"], heads["policy"])
        second.weights["draft"][0, 0] += 1
        verified = str(sync.verify(weights=True))
    return found, verified


def test_one_call_sends_a_policy_and_the_draft_model_beside_it():
    found, verified = pool.run(1, together)[0]
    rounds = (2, "draft", "the draft model of draft of two"), (3, "policy", "policy of two")
    for number, broken, name in rounds:
        assert f"to have version {number}, found 1 failure: {name} of engine 0: ZeroDivisionError" in found[broken]
        assert "The weights of engine 0 may be half old and half new" in found[broken]
    assert "draft model of worker 0 of engine 1: 1 of 1 tensors differ" in verified
    assert verified.count("differ") == 1


class Schedulers:
    """Calls a loader of ours like SGLang's ``Engine``, for one scheduler with a model and a draft model."""

    def __init__(self, model, draft=None):
        self._models, self.calls, self.refuses = [model, *filter(None, [draft])], [], ""
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(update_weight_version=self._version)

    def _called(self, name):
        self.calls.append(name)
        return self.refuses != name, "a session is open" if self.refuses == name else "Success"

    def begin_weight_update(self, selector="all"):
        assert selector == "target"
        return self._called("begin")

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        assert flush_cache
        module, _, name = load_format.rpartition(".")
        for model in self._models:  # what the loader raises would end SGLang and its parent
            getattr(importlib.import_module(module), name)(model, named_tensors)
        return self._called("update")

    def end_weight_update(self):
        return self._called("end")

    async def _version(self, request):
        self.calls.append(request)

    def generate(self, input_ids, sampling_params, return_logprob, logprob_start_len):
        """Every token has a log-probability that is its id, negated; the first has none."""
        assert (sampling_params["max_new_tokens"], return_logprob, logprob_start_len) == (1, True, 0)
        rows = [[(None, row[0], None), *((-token, token, None) for token in row[1:])] for row in input_ids]
        return [{"meta_info": {"input_token_logprobs": row}} for row in rows]


def by_sglang():
    models, weight, worker = model_and_worker()
    model, draft = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    sglang._worker_of = {model: worker}.__getitem__  # a draft model takes part in no round
    engine = Schedulers(model, draft)
    call = sglang.client(engine)
    requests = SimpleNamespace(UpdateWeightVersionReqInput=dict)
    with (
        mock.patch.dict("sys.modules", {"sglang.srt.managers.io_struct": requests}),
        mb.WeightSync(models, call, timeout=30) as sync,
    ):
        sync(version=5)
        reported = {"new_version": "5", "abort_all_requests": False}
        assert engine.calls == ["begin", "update", "end", reported]
        assert torch.equal(weight, mb.to_hf_state_dict(models)[HEAD])
        (found,) = sync.verify([[1, 2, 3], [4, 5]]).log_probs
        assert [(token.token, token.engine) for token in found.tokens] == [(2, -2.0), (3, -3.0), (5, -5.0)]
        with pytest.raises(TransferError, match=r"SGLang to take the weights, .* expected what a"):
            call({"address": 3}, 6)
        assert engine.calls[4:] == ["begin", "update", "end"]  # and no version
        engine.refuses = "begin"
        with pytest.raises(TransferError, match=r"found that it did not: a session is open"):
            sync()
        sglang._worker_of = {}.__getitem__
        engine.refuses = ""
        with pytest.raises(TransferError, match=r"found that it did not: KeyError: Linear"):
            sync()
    with pytest.raises(TransferError, match="found 1 tensors: w; use"):
        sglang.load(model, [("w", weight)])


def test_sglangs_loader_of_ours_takes_a_round_from_its_one_tensor():
    pool.run(1, by_sglang)


def test_the_plug_in_of_vllm_is_the_function_that_is_declared_and_harms_no_process_without_vllm():
    project = tomllib.loads((Path(mb.__file__).parent.parent / "pyproject.toml").read_text())
    (home,) = project["project"]["entry-points"]["vllm.general_plugins"].values()
    assert EntryPoint("mcore_bridge", home, "vllm.general_plugins").load()() is None


def test_a_worker_has_a_name_whatever_an_engine_has_put_into_the_config():
    """SGLang puts the config itself into a field of it. Then transformers cannot show it as JSON."""
    model, names = torch.nn.Linear(1, 1), set()
    for size in (64, 128):
        config = tiny("qwen3", hidden_size=size)
        names.add(worker_name("engine 1", model, config, "worker 0 of 1"))
        config.parts = {"text": config, (0, 1): torch.bfloat16}
        names.add(worker_name("engine 1", model, config, "worker 0 of 1"))
        with pytest.raises(TypeError):
            repr(config)
    assert len(names) == 4
    assert all(name.startswith("engine 1, Linear ") and name.endswith(", worker 0 of 1") for name in names)
