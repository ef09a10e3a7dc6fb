"""The adapters that a forward uses: one of several sets, each with a name, or none, as for a reference policy.

Only the set in use is a part of the model. So each function for adapters means this set, and megatron-core's DDP and
optimizer, made while a set is in use, have the parameters of this set alone. The other sets are kept beside the model.
While the rows of a batch use several sets, the model has all of these sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mcore_bridge.config.mesh.alike import Shared, agreed, replica_groups
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.adapters import Adapters
from mcore_bridge.rules.names import TOWER
from mcore_bridge.weights.model_chunks import Models, chunks_of, groups_of, switch_of
from mcore_bridge.weights.model_tensors import note_built

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from mcore_bridge.batches.row_sets import TokenSets


@dataclass(frozen=True)
class AdapterSet:
    """One set of adapters of a chunk.

    Attributes:
        made: rank, scale and rules.
        modules: the adapters by the path of their layer in the chunk.
    """

    made: Adapters
    modules: Mapping[str, nn.Module]

    @cached_property
    def _holding(self) -> list[nn.Module]:
        """The modules with parameters."""
        return [part for module in self.modules.values() for part in module.modules() if part._parameters]

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the set."""
        return (own for part in self._holding for own in part._parameters.values() if own is not None)

    @property
    def marker(self) -> str:
        """The name of a state in megatron-core's tracker of random numbers, which is there while the set is in use.

        A recompute restores the states of its forward, and so shows which set the forward has used.
        """
        return f"mcore_bridge: adapters in use {id(self)}"


@dataclass
class AdapterSets:
    """All sets of a chunk by name, and the name of the set in use; empty while none is in use.

    Attributes:
        by_row: the sets of rows, while the rows of a batch use several and the chunk has a tower with some of them.
    """

    by_name: dict[str, AdapterSet] = field(default_factory=dict)
    in_use: str = ""
    by_row: TokenSets | None = None

    def require_in_use(self) -> None:
        """Raise ``ConfigError`` in the recompute of a forward that has used another set."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        states = get_cuda_rng_tracker().states_
        for name, kept in self.by_name.items() if len(self.by_name) > 1 else ():
            if kept.marker in states and name != self.in_use:
                raise ConfigError(
                    f"this is the recompute of a forward with the adapters {name!r}, and {self.in_use!r} are in use: "
                    "call set_adapters between steps, and again after you restore random states"
                )

    @contextmanager
    def used_by_row(self, chunk: GPTModel, tokens: TokenSets) -> Iterator[None]:
        """In the block, let each token of a forward use the set of its row. Then the set in use is in use again.

        Args:
            chunk: the chunk that has these sets.
            tokens: the tokens of each set.
        """
        from mcore_bridge.factory.modules.row_adapters import adapters_by_row

        before, of_sets = self.in_use, [self.by_name[name].modules for name in tokens.names]
        modules, routed = adapters_by_row(chunk, of_sets, tokens)
        hooks = [layer.router.register_forward_hook(dispatched.follow) for layer, dispatched in routed.items()]
        lay_aside(chunk)
        _attach(chunk, modules)
        self.by_row = tokens if any(path.startswith(TOWER) for path in modules) else None
        try:
            yield
        finally:
            self.by_row = None
            for hook in hooks:
                hook.remove()
            _detach(chunk, modules)
            _put_in_use(chunk, before)


def set_adapters(models: Models, name: str) -> None:
    """Let all forwards, exports and functions use the set of adapters ``name``, until the next call.

    Nothing is copied. The other sets keep their values, and the optimizers that train them keep their state. Call it
    between steps: the recompute of a forward that used another set raises. All ranks of a replica call it together.

    Wrap the models and make the optimizer anew for each set, while the set is in use. Later use both only with the set.

    Args:
        models: this rank's chunks with adapters, wrapped or not.
        name: the ``name`` of an ``add_adapters``.

    Raises:
        ConfigError: the models have no such set, or ranks pass different names.

    Example:
        >>> mb.add_adapters(policy, rank=4, alpha=8, targets=["o_proj"], name="other").rank      # in use from now on
        4
        >>> mb.set_adapters(policy, "default")
        >>> len(dict(mb.iter_hf_adapters(policy)))
        16
    """

    def checked() -> tuple[Sequence[GPTModel], Shared]:
        chunks = chunks_of(models)
        names = list(sets_of(chunks[0]).by_name)
        if name not in names:
            raise ConfigError(f"models must have adapters named {name!r}, found {names}: call add_adapters first")
        return chunks, {"name": name}

    for chunk in agreed(replica_groups(groups_of(models)), checked, ConfigError):
        use(chunk, name)


@contextmanager
def without_adapters(models: Models) -> Iterator[None]:
    """Make every forward of ``models`` in the block run the base alone.

    A recompute uses adapters exactly if its forward did, wherever the backward runs. For this, the switch is one of the
    random states, which megatron-core restores for a recompute. Blocks may be nested. All ranks of a replica enter it
    together. CUDA graphs keep what they captured.

    Args:
        models: this rank's chunks with adapters, wrapped or not.

    Raises:
        ConfigError: the models have no adapters, so the policy would be its own reference.

    Example:
        >>> with mb.without_adapters(policy), torch.no_grad():
        ...     reference = mb.forward(policy, input_ids, attention_mask).log_probs
        >>> torch.equal(reference, mb.forward(models, input_ids, attention_mask).log_probs)
        True
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from mcore_bridge.factory.modules.adapter import Adapter

    chunks = chunks_of(models)
    if not hasattr(chunks[0], "bridge_adapters"):
        raise ConfigError("models must have adapters, found none: the policy would be its own reference")
    switch = switch_of(chunks[0].bridge_adapters)
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, Adapter):
            module.switch = switch
    was_off = switch in get_cuda_rng_tracker().states_
    get_cuda_rng_tracker().states_[switch] = torch.get_rng_state()
    try:
        yield
    finally:
        if not was_off:
            get_cuda_rng_tracker().states_.pop(switch, None)


def sets_of(chunk: GPTModel) -> AdapterSets:
    """The sets of adapters of a chunk. A change of them is kept if the chunk has some."""
    sets: AdapterSets = getattr(chunk, "bridge_adapter_sets", None) or AdapterSets()
    return sets


def keep(chunk: Any, name: str, made: Adapters, modules: Mapping[str, nn.Module]) -> None:
    """Add a set to a chunk, beside the model, and let its layers ask for the adapter in use.

    Args:
        modules: as for ``AdapterSet``.
    """
    chunk.bridge_adapter_sets = sets = sets_of(chunk)
    known = {path for kept in sets.by_name.values() for path in kept.modules}
    sets.by_name[name] = AdapterSet(made, modules)
    for path in modules:  # in their order: DDP lays out gradients in the order of modules, which all ranks must share
        if path not in known:
            _let_ask(chunk, path, sets.require_in_use)


def _let_ask(chunk: Any, path: str, check: Callable[[], None]) -> None:
    """Let the layer at a path ask for its adapter. Experts that are modules get a module there for all of them."""
    from mcore_bridge.factory.modules.adapter import ExpertLayers, beside, beside_plain

    parent, _, name = path.rpartition(".")
    if hasattr(owner := chunk.get_submodule(parent), "local_experts"):
        owner.add_module(name, ExpertLayers(owner, name, check))
        return
    layer = chunk.get_submodule(path)
    hook = beside_plain if isinstance(layer, nn.Linear) else beside
    layer.register_forward_hook(partial(hook, check), prepend=True)  # before our hook on latents
    if hasattr(layer, "return_layernorm_output"):
        layer.return_layernorm_output = True  # the input of the weight, and so of A


def use(chunk: Any, name: str) -> None:
    """Make the set ``name`` of a chunk a part of the model, and no other set."""
    lay_aside(chunk)
    _put_in_use(chunk, name)
    chunk.bridge_adapters = sets_of(chunk).by_name[name].made
    note_built(chunk)


def _put_in_use(chunk: Any, name: str) -> None:
    """Make the set ``name`` a part of the model of a chunk, which has none."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    sets = sets_of(chunk)
    kept, sets.in_use = sets.by_name[name], name
    _attach(chunk, kept.modules)
    if len(sets.by_name) > 1:
        get_cuda_rng_tracker().states_[kept.marker] = torch.get_rng_state()


def _attach(chunk: Any, modules: Mapping[str, nn.Module]) -> None:
    for path, adapter in modules.items():
        layer = chunk.get_submodule(path)
        modes = {adapter.training, *(part.training for part in adapter.children())}
        layer.adapter = adapter if modes == {layer.training} else adapter.train(layer.training)


def lay_aside(chunk: Any) -> None:
    """Take the set in use out of the model of a chunk, if there is one."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    sets = sets_of(chunk)
    for kept in sets.by_name.values():
        get_cuda_rng_tracker().states_.pop(kept.marker, None)
    _detach(chunk, sets.by_name[sets.in_use].modules if sets.in_use else ())
    sets.in_use = ""


def _detach(chunk: Any, paths: Iterable[str]) -> None:
    for path in paths:
        del chunk.get_submodule(path).adapter
