"""A rollout engine for tests, only in torch: it holds weights like engines, and loads them by HF names.

One rank of ``tp`` in a stage of ``pp`` has queries, keys and values in one parameter, with KV heads repeated if there
are fewer than ranks. Experts are a stack of gate and up and a stack of down. The vocabulary is padded, the router is
cast, and the head is tied. A copy of a projection, transposed and padded, is made after loading.

There are four switches: norms to which one is added, which is no copy; rows that numpy shuffles after loading, which a
recorder of torch's operations cannot record; a loader with separate memory; and a loader that works in another thread.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener

import torch
from torch import nn

from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.shared_memory import allocate


@dataclass(frozen=True)
class Sizes:
    layers: int = 2
    hidden: int = 8
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 4
    experts: int = 4
    intermediate: int = 6
    vocab: int = 21
    padded_vocab: int = 32
    router: torch.dtype = torch.float32


HF_FIELDS = {
    "num_hidden_layers": Sizes.layers,
    "hidden_size": Sizes.hidden,
    "num_attention_heads": Sizes.heads,
    "num_key_value_heads": Sizes.kv_heads,
    "head_dim": Sizes.head_dim,
    "num_experts": Sizes.experts,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": Sizes.intermediate,
    "vocab_size": Sizes.vocab,
    "tie_word_embeddings": True,
}
"""Fields of an HF config of Qwen3-MoE that fits the engine."""


def specs(sizes, dtype=torch.bfloat16):
    """The HF tensors of a checkpoint that fits."""
    s = sizes
    shapes = {"model.embed_tokens.weight": (s.vocab, s.hidden), "model.norm.weight": (s.hidden,)}
    for layer in range(s.layers):
        p = f"model.layers.{layer}"
        shapes[f"{p}.input_layernorm.weight"] = (s.hidden,)
        shapes[f"{p}.post_attention_layernorm.weight"] = (s.hidden,)
        shapes[f"{p}.self_attn.q_norm.weight"] = (s.head_dim,)
        shapes[f"{p}.self_attn.k_norm.weight"] = (s.head_dim,)
        shapes[f"{p}.self_attn.q_proj.weight"] = (s.heads * s.head_dim, s.hidden)
        shapes[f"{p}.self_attn.k_proj.weight"] = (s.kv_heads * s.head_dim, s.hidden)
        shapes[f"{p}.self_attn.v_proj.weight"] = (s.kv_heads * s.head_dim, s.hidden)
        shapes[f"{p}.self_attn.o_proj.weight"] = (s.hidden, s.heads * s.head_dim)
        shapes[f"{p}.mlp.gate.weight"] = (s.experts, s.hidden)
        for expert in range(s.experts):
            for name in ("gate_proj", "up_proj"):
                shapes[f"{p}.mlp.experts.{expert}.{name}.weight"] = (s.intermediate, s.hidden)
            shapes[f"{p}.mlp.experts.{expert}.down_proj.weight"] = (s.hidden, s.intermediate)
    return [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]


class Layer(nn.Module):
    def __init__(self, s, tp, rank, dtype, device):
        super().__init__()
        self.sizes, self.tp, self.rank = s, tp, rank
        options = {"dtype": dtype, "device": device}
        self.heads, self.kv_heads = s.heads // tp, max(1, s.kv_heads // tp)
        width = s.intermediate // tp

        def parameter(*shape, **other):
            return nn.Parameter(torch.zeros(*shape, **{**options, **other}), requires_grad=False)

        self.norm, self.post_norm = parameter(s.hidden), parameter(s.hidden)
        self.qk_norms = parameter(2, s.head_dim)
        self.qkv = parameter((self.heads + 2 * self.kv_heads) * s.head_dim, s.hidden)
        self.o_proj = parameter(s.hidden, self.heads * s.head_dim)
        self.router = parameter(s.experts, s.hidden, dtype=s.router)
        self.w13 = parameter(s.experts, 2 * width, s.hidden)
        self.w2 = parameter(s.experts, s.hidden, width)
        self.constant = parameter(3)  # like a bias that only another rank adds
        self.prepared = torch.zeros(self.heads * s.head_dim + 3, s.hidden, **options)  # of o_proj, by its kernel


class StandIn(nn.Module):
    """One rank. ``load`` is its loader with all its later work."""

    def __init__(
        self,
        tp=1,
        rank=0,
        pp=1,
        stage=0,
        *,
        adds=False,
        shuffles=False,
        layerwise=False,
        threads=False,
        device="cpu",
        sizes=None,
    ):
        super().__init__()
        sizes, dtype = sizes or Sizes(), torch.bfloat16
        self.adds, self.shuffles, self.layerwise, self.threads = adds, shuffles, layerwise, threads
        self.sizes, self.tp, self.rank = sizes, tp, rank
        each = sizes.layers // pp
        self.first, self.is_last = stage * each, stage == pp - 1
        self.layers = nn.ModuleList(Layer(sizes, tp, rank, dtype, device) for _ in range(each))
        rows = sizes.padded_vocab // tp
        self.embed = nn.Parameter(torch.zeros(rows, sizes.hidden, dtype=dtype, device=device), requires_grad=False)
        self.head = nn.Linear(1, 1, bias=False, device=device)
        self.head.weight = self.embed
        self.norm = nn.Parameter(torch.zeros(sizes.hidden, dtype=dtype, device=device), requires_grad=False)
        self.register_buffer("rotary", torch.arange(7.0, device=device))
        self.num_loads = 0
        self.up_first = False  # a setting of its kernels, which no shape shows

    @torch.no_grad()
    def load(self, pairs):
        self.num_loads += 1
        if self.layerwise:
            self._load_layerwise(pairs)
        elif self.threads:  # SGLang does this for models with experts
            with ThreadPoolExecutor(1) as executor:
                executor.submit(self._take_all, list(pairs)).result()
        else:
            self._take_all(pairs)
        for layer in self.layers:
            self._prepare(layer)

    def _take_all(self, pairs):
        for name, tensor in pairs:
            self._take(name, tensor)

    def _load_layerwise(self, pairs):
        """Load into new memory, like vLLM's reload: first onto the meta device, to count elements."""
        waiting = list(pairs)
        held = dict(self.named_parameters())
        for device in ("meta", self.embed.device):
            for name, parameter in held.items():
                self._place(name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))
            for layer in self.layers:
                layer.scale = torch.tensor(1.0)
            for name, tensor in waiting:
                self._take(name, tensor)
        for name, parameter in dict(self.named_parameters()).items():
            if name in held:
                held[name].data.copy_(parameter.data)
                self._place(name, held[name])

    def _place(self, name, parameter):
        owner, _, last = name.rpartition(".")
        setattr(self.get_submodule(owner), last, parameter)

    def _take(self, name, tensor):
        if name == "model.norm.weight":
            if self.is_last:
                self.norm.data.copy_(tensor)
            return
        if name == "model.embed_tokens.weight":
            if self.first and not self.is_last:
                return
            rows = self.embed.shape[0]
            mine = tensor[self.rank * rows : (self.rank + 1) * rows]
            self.embed[: len(mine)].data.copy_(mine)
            self.embed[len(mine) :].data.fill_(0)
            return
        _, _, number, rest = name.split(".", 3)
        if int(number) - self.first not in range(len(self.layers)):
            return
        layer, s = self.layers[int(number) - self.first], self.sizes
        if rest == "input_layernorm.weight":
            layer.norm.data.copy_(tensor + 1 if self.adds else tensor)
        elif rest == "post_attention_layernorm.weight":
            layer.post_norm.data.copy_(tensor)
        elif rest.endswith("_norm.weight"):
            layer.qk_norms.data["qk".index(rest.split(".")[1][0])].copy_(tensor)
        elif rest == "mlp.gate.weight":
            layer.router.data.copy_(tensor)
        elif rest.startswith("mlp.experts."):
            _, _, expert, projection, _ = rest.split(".")
            self._take_expert(layer, int(expert), projection, tensor)
        elif rest == "self_attn.o_proj.weight":
            layer.o_proj.data.copy_(tensor.chunk(self.tp, 1)[self.rank].contiguous())
        else:
            which = "qkv".index(rest.split(".")[1][0])
            heads = layer.heads if which == 0 else layer.kv_heads
            first = self.rank if which == 0 or s.kv_heads >= self.tp else self.rank * s.kv_heads // self.tp
            start = [0, layer.heads, layer.heads + layer.kv_heads][which]
            rows = tensor.narrow(0, first * heads * s.head_dim, heads * s.head_dim)
            layer.qkv.data.narrow(0, start * s.head_dim, heads * s.head_dim).copy_(rows)

    def _take_expert(self, layer, expert, projection, tensor):
        if projection == "down_proj":
            layer.w2.data[expert].copy_(tensor.chunk(self.tp, 1)[self.rank])
            return
        half = layer.w13.shape[1] // 2
        start = half * ((projection == "up_proj") ^ self.up_first)
        layer.w13.data[expert].narrow(0, start, half).copy_(tensor.chunk(self.tp, 0)[self.rank])

    def _prepare(self, layer):
        layer.constant.data.fill_(-0.5)  # its highest bit is set
        layer.prepared = torch.nn.functional.pad(layer.o_proj.t().contiguous(), (0, 0, 0, 3))
        if self.shuffles:
            words = layer.prepared.view(torch.int16).numpy()
            words[:] = words[[*range(1, len(words), 2), *range(0, len(words), 2)]]

    def held(self):
        """All tensors that a forward reads."""
        derived = {f"layers.{i}.prepared": layer.prepared for i, layer in enumerate(self.layers)}
        return {name: tensor.clone() for name, tensor in {**self.state_dict(), **derived}.items()}


def in_shared_memory(model):
    """Move all tensors of ``model`` into one mapped file, or one allocation of a GPU, which another process can open.

    Returns:
        The memory.
    """
    derived = [layer.prepared for layer in model.layers]
    tensors = {id(t): t for t in [*model.state_dict(keep_vars=True).values(), *derived]}
    starts, size = {}, 0
    for key, tensor in tensors.items():
        starts[key], size = size, size + -(-tensor.nbytes // 8) * 8  # mostly not aligned to 16
    memory = allocate(size + 64, model.embed.device)
    for key, tensor in tensors.items():
        place = memory[starts[key] : starts[key] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor)
    return memory


def loaded(pairs, *arguments, **options):
    """The tensors of an engine whose own loader has loaded ``pairs``."""
    model = StandIn(*arguments, **options)
    model.load(pairs.items())
    return model.held()


def differing(held, expected):
    """The names of tensors whose bits differ."""
    assert held.keys() == expected.keys()
    return [n for n in held if not torch.equal(held[n].view(torch.uint8), expected[n].view(torch.uint8))]


# a process of its own -------------------------------------------------------------------------------------------------

FORBIDDEN = ("megatron", "transformers", "einops", "safetensors", "transformer_engine")


class _Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"an engine's process has no {name}")


def serve_all(addresses, engines):
    """A process for each address, with an engine of these arguments; they are forked, since they have torch alone."""
    sys.meta_path.insert(0, _Forbid())
    children = []
    for address, arguments in zip(addresses, engines, strict=True):
        child = os.fork()
        if not child:
            with Listener(address) as listener:
                serve(listener, *arguments)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def connected(address):
    """The pipe to an engine. The engine may not have started yet, or may not listen yet."""
    while True:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return Client(address)
        time.sleep(0.01)


def serve(listener, *arguments):
    """An engine with torch alone: it sends its map, and then runs methods by name, for one trainer after another."""
    import mcore_bridge as mb

    pipe = listener.accept()
    model, receiver = StandIn(*arguments), None
    memory = [in_shared_memory(model)]
    engine = mb.map_engine(pipe.recv(), model, model.load, engine=f"stand-in {arguments}")
    memory.append(in_shared_memory(model))  # it makes some tensors anew while it loads
    pipe.send(engine.map)
    while True:
        try:
            method, argument = pipe.recv()
        except EOFError:  # the trainer has ended
            engine.break_off()
            pipe = listener.accept()
            continue
        answer = argument
        try:
            if method == "ring":
                receiver = mb.Receiver(*argument)
            elif method == "bucket":
                receiver.copy_into(argument, engine)
            elif method == "finish":
                receiver.finish()
            elif method == "map":
                answer = engine.map
            elif method == "share":
                answer = engine.share()
            elif method == "complete":
                engine.complete()
            elif method == "move":  # like an engine that slept: the memory that it shared before still exists
                memory.append(in_shared_memory(model))
            elif method == "held":
                answer = held_bits(model.held()), model.num_loads, engine.state
            elif method == "sample":
                answer = engine.require_whole()
            else:
                if receiver is not None:
                    receiver.close()
                pipe.send([name for name in sys.modules if name.partition(".")[0] in FORBIDDEN])
                return
        except Exception as error:
            answer = error
        pipe.send(answer)


def held_bits(held):
    """The bytes of each tensor."""
    return {name: bytes(tensor.cpu().view(torch.uint8).numpy()) for name, tensor in held.items()}
