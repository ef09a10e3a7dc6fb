"""A table of all calls that read or write a folder and all checks they need: each cell has a test or a reason.

A new public function or command must be entered here. So a check that belongs to all of them cannot be forgotten for
one.
"""

import contextlib
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import engines
from mcore_bridge.commands.app import app
from mcore_bridge.convert import convert as api
from mcore_bridge.convert.hf_to_torch import rank_files
from mcore_bridge.convert.rank_files.rank_folder import iter_mg_weights
from mcore_bridge.errors import BridgeError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers.rlinf import convertor
from mcore_bridge.trainers.rlinf.__main__ import SCRIPTS
from mcore_bridge.trainers.rlinf.convertor_settings import ConvertorSettings
from mcore_bridge.weights import save as saving
from mcore_bridge.weights.files.folder_lock import PREFIX
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.sidecars import NOTES
from tests.support import command, composites
from tests.support.bounds import ONE
from tests.support.conversions import quiet
from tests.support.strategies import random_state, tiny
from tests.support.strategies import save as save_state

HF = tiny("llama", num_hidden_layers=1, vocab_size=64)
EMPTY = "found an empty string: is a variable not set"
SAME = "is both source and target"
CHANGED = "was changed while it was read, in 1 file such as "
Cell = Callable[["Place"], None] | str
"""The test of a check, or the reason why an entry point does not need the check."""
CHECKS = ("empty path", "target is source", "source changed", "notes on weights", "lost bits")


class Place:
    """Folders to read, a folder to write, and models that came from the first of them."""

    def __init__(self, sources: dict[str, Path], folder: Path, mesh: contextlib.ExitStack) -> None:
        self.mesh, self.has_mesh = mesh, False
        self.hf, self.dist, self.peft, self.whole, self.files = (
            shutil.copytree(sources[name], folder / name) for name in ("hf", "dist", "peft", "whole", "files")
        )
        self.out = folder / "out"

    def models(self, source: Any = None, **options: Any) -> Any:
        if not self.has_mesh:  # a conversion makes its folder itself
            self.mesh.enter_context(rank_of(ONE, 0, 1))
            self.has_mesh = True
        options = {"dtype": torch.float32, **options}
        return mb.build_model(source or self.hf, dims=ONE, device="cpu", **options)

    def with_adapters(self, **options: Any) -> Any:
        models = self.models()
        mb.add_adapters(models, self.peft, **options)
        return models

    @contextlib.contextmanager
    def refuses(self, message: str, unchanged: Path | None = None) -> Iterator[None]:
        """Assert that the block raises, and that the folder is unchanged."""
        before = _content(unchanged or self.out)
        with pytest.raises(BridgeError, match=message):
            yield
        assert _content(unchanged or self.out) == before

    def changing(self, folder: Path) -> Callable[..., None]:
        """Rewrite a file of a folder at the first event, as a concurrent save would."""
        (path, *_) = (*folder.glob("*.safetensors"), *folder.glob("*.distcp"), *folder.glob("mp_rank_*/*.pt"))

        def on_event(*event: object) -> None:
            path.write_bytes(path.read_bytes())

        return on_event

    def with_notes(self) -> Path:
        self.out.mkdir(exist_ok=True)
        for name in NOTES:
            (self.out / name).write_text("{}")
            (self.hf / name).write_text("{}")
        return self.out


def _content(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without what an interrupted conversion keeps for its next run."""
    files = (path for path in folder.rglob("*") if path.is_file() and PREFIX not in str(path))
    return {str(path): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("sources")
    (top / "hf").mkdir()
    save_state(random_state(HF), HF, top / "hf")
    api.convert(top / "hf", top / "dist", on_event=quiet)
    api.convert(top / "hf", top / "files", rank_files=rank_files("torch", ONE, "torch"), on_event=quiet)
    composites.written("qwen2_5_vl", top / "whole")
    with rank_of(ONE, 0, 1):
        models = mb.build_model(top / "hf", dims=ONE, dtype=torch.float32, device="cpu")
        mb.add_adapters(models, rank=2, alpha=2, targets=["q_proj"])
        mb.save_hf_adapters(models, top / "peft")
    return {name: top / name for name in ("hf", "dist", "peft", "whole", "files")}


@pytest.fixture
def place(sources: dict[str, Path], tmp_path: Path) -> Iterator[Place]:
    with contextlib.ExitStack() as mesh:
        yield Place(sources, tmp_path, mesh)


def empty(*calls: Callable[[Place, Any], object]) -> Cell:
    """Each call, for which the path is empty in both ways."""

    def attempt(place: Place) -> None:
        for call in calls:
            for path in ("", Path()):
                with place.refuses(EMPTY):
                    call(place, path)

    return attempt


def not_a_writer(*calls: Callable[[Place, Any], object], changed: Cell = "") -> dict[str, Cell]:
    nothing = "it writes no folder"
    reads_once = "it opens each file once, so that a later save cannot mix with it"
    return dict(zip(CHECKS, (empty(*calls), nothing, changed or reads_once, nothing, nothing), strict=True))


def changed_while(name: str, folder: str, call: Callable[[Place], object]) -> Cell:
    """The call, during which a file of ``folder`` is written to when the function ``name`` begins to read."""

    def attempt(place: Place) -> None:
        touch, read = place.changing(getattr(place, folder)), pkgutil.resolve_name(name)

        def reading(*arguments: Any, **options: Any) -> Any:
            touch()
            return read(*arguments, **options)

        with mock.patch(name, reading), place.refuses("was changed while it was read"):
            call(place)

    return attempt


def saves(*paths: Callable[[Place, Any], object], own: Cell, changed: Cell, notes: Cell, lost: Cell) -> dict[str, Cell]:
    return dict(zip(CHECKS, (empty(*paths), own, changed, notes, lost), strict=True))


# what saves models ----------------------------------------------------------------------------------------------------


def hf_over_its_source(place: Place) -> None:
    """Trainers resume into a folder: a save over it is no mistake, and writes equal bits."""
    before = mb.Manifest.from_folder(place.hf, digests=True)
    mb.save_hf_checkpoint(place.models(), place.hf)
    assert mb.Manifest.from_folder(place.hf, digests=True).differences(before) == ()


def hf_from_a_whole_that_changes(place: Place) -> None:
    models, touch, write = place.models(place.whole), place.changing(place.whole), saving.write_pairs

    def writing(*arguments: Any) -> None:
        touch()
        write(*arguments)

    with mock.patch.object(saving, "write_pairs", writing), place.refuses(CHANGED):
        mb.save_hf_checkpoint(models, place.out)


def hf_notes(place: Place) -> None:
    mb.save_hf_checkpoint(place.models(), place.with_notes())
    assert not [name for name in NOTES if (place.out / name).exists()]


def hf_lost_bits(place: Place) -> None:
    link = place.out.with_name("link")
    link.symlink_to(place.hf)
    for models, target, dtype in (
        (place.models(dtype=torch.bfloat16), link, None),
        (place.models(), place.hf / ".." / "hf", {"*.mlp.*": torch.bfloat16}),
        (loaded_later(place), place.hf, torch.float16),
    ):
        with place.refuses("is a folder that these models came from, and would lose bits of", place.hf):
            mb.save_hf_checkpoint(models, target, dtype=dtype)
    mb.save_hf_checkpoint(place.models(dtype=torch.bfloat16), place.out)


def loaded_later(place: Place) -> Any:
    models = place.models(HF, load_weights=False)
    mb.load_hf_weights(models, place.hf)
    return models


def peft_lost_bits(place: Place) -> None:
    for models in (place.with_adapters(), with_loaded_adapters(place)):
        with place.refuses("would lose bits", place.peft):
            mb.save_hf_adapters(models, place.peft, dtype=torch.bfloat16)
        mb.save_hf_adapters(models, place.peft)


def with_loaded_adapters(place: Place) -> Any:
    models = place.models()
    mb.add_adapters(models, rank=2, alpha=2, targets=["q_proj"])
    mb.load_adapters(models, place.peft)
    return models


def peft_notes(place: Place) -> None:
    """The base model may be in the folder. Files that describe it stay unchanged."""
    mb.save_hf_adapters(place.with_adapters(), place.with_notes())
    assert all((place.out / name).exists() for name in NOTES)


def dist_over_its_source(place: Place) -> None:
    models = place.models()
    mb.load_checkpoint(models, place.dist)
    mb.save_checkpoint(models, place.dist)
    assert mb.load_checkpoint(models, place.dist).cast == {}


def dist_lost_bits(place: Place) -> None:
    models = place.models(dtype=torch.bfloat16)
    mb.load_checkpoint(models, place.dist, dtype=torch.bfloat16)
    with place.refuses("would lose bits", place.dist):
        mb.save_checkpoint(models, place.dist)


def dist_notes(place: Place) -> None:
    mb.save_checkpoint(place.models(), place.with_notes())
    assert not [name for name in NOTES if (place.out / name).exists()]


# conversions ----------------------------------------------------------------------------------------------------------


def convert(place: Place, source: Any, target: Any, **options: Any) -> None:
    api.convert(source, target, **{"on_event": quiet, **options})


def convert_onto_a_source(place: Place) -> None:
    """The target is the source by another path, or the source is a folder of links to files in the target."""
    linked, links = place.out.with_name("linked"), place.out.with_name("links")
    linked.symlink_to(place.hf)
    links.mkdir()
    for path in place.hf.iterdir():
        (links / path.name).symlink_to(path)
    for source, target, options in (
        (place.hf, place.hf, {}),
        (place.hf, linked, {}),
        (linked, place.hf / "." / ".." / "hf", {}),
        (links, place.hf, {}),
        (place.dist, place.dist, {}),
        (place.dist, place.hf, {"hf": place.hf}),
        (place.files, place.files, {}),
        (place.hf, place.hf, {"rank_files": rank_files("torch", ONE, "torch")}),
    ):
        with place.refuses(SAME, target):
            convert(place, source, target, **options)
    convert(place, place.dist, place.dist / "inside", hf=place.dist)
    assert Checkpoint(place.dist / "inside").keys() == Checkpoint(place.hf).keys()


def convert_what_changes(place: Place) -> None:
    for source, folder in ((place.hf, place.hf), (place.dist, place.dist), (place.files, place.files / "release")):
        with place.refuses(CHANGED):
            convert(place, source, place.out, on_event=place.changing(folder))
        shutil.rmtree(place.out, ignore_errors=True)


def convert_notes(place: Place) -> None:
    convert(place, place.dist, place.with_notes())
    assert not [name for name in NOTES if (place.out / name).exists()]


def merge(place: Place, base: Any, adapter: Any, target: Any, on_event: Any = quiet) -> None:
    api.merge(base, adapter, target, on_event=on_event)


def merge_onto_a_source(place: Place) -> None:
    link = place.out.with_name("link")
    link.symlink_to(place.peft)
    for target in (place.hf, place.peft, link):
        with place.refuses(SAME, target):
            merge(place, place.hf, place.peft, target)
    shutil.copytree(place.peft, place.out)
    with place.refuses("holds a checkpoint of kind adapter"):
        merge(place, place.hf, place.peft, place.out)


def merge_what_changes(place: Place) -> None:
    for folder in (place.hf, place.peft):
        with place.refuses(CHANGED):
            merge(place, place.hf, place.peft, place.out, place.changing(folder))
        shutil.rmtree(place.out, ignore_errors=True)


def merge_notes(place: Place) -> None:
    merge(place, place.hf, place.peft, place.with_notes())
    assert not [name for name in NOTES if (place.out / name).exists()]


# commands -------------------------------------------------------------------------------------------------------------


def refused(place: Place, message: str, *arguments: object, unchanged: Path | None = None) -> None:
    before = _content(unchanged or place.out)
    assert message in command.refused(command.run(*arguments))
    assert _content(unchanged or place.out) == before


def empty_options(*calls: Callable[[Place], tuple[object, ...]]) -> Cell:
    def attempt(place: Place) -> None:
        for call in calls:
            refused(place, EMPTY, *call(place))

    return attempt


def verify_onto_a_source(place: Place) -> None:
    for other in ([], ["--dtype", "bfloat16"]):
        refused(place, SAME, "verify", place.hf, "--save", place.hf, *other, unchanged=place.hf)
    refused(place, SAME, "verify", place.hf, "--against", place.whole, "--save", place.whole, unchanged=place.whole)
    refused(place, SAME, "verify", place.hf, "--adapter", place.peft, "--save", place.peft, unchanged=place.peft)


def verify_what_changes(place: Place) -> None:
    touch, run = place.changing(place.hf), command.ranks_in_pool

    def ranks(*arguments: Any, **options: Any) -> Any:
        touch()
        return run(*arguments, **options)

    with mock.patch("tests.support.command.ranks_in_pool", ranks):
        refused(place, CHANGED, "verify", place.hf, "--no-logits", "--save", place.out)
    assert not place.out.exists()


# of RLinf -------------------------------------------------------------------------------------------------------------


def middle(place: Place) -> Path:
    convertor.hf_to_middle_file(ConvertorSettings(load_path=str(place.hf), save_path=str(place.out)))
    return place.out


def rlinf(call: Callable[[str, str], None], source: Callable[[Place], Path]) -> dict[str, Cell]:
    """The checks of one function of the convertor, which takes a folder to read and one to write."""

    def onto(place: Place) -> None:
        folder = source(place)
        with place.refuses(SAME, folder):
            call(str(folder), str(folder))

    def changes(place: Place) -> None:
        folder, target = source(place), place.out.with_name("made")
        write, touch = convertor.copy_companions, place.changing(folder)

        def copying(*arguments: Any) -> None:
            touch()
            write(*arguments)

        with mock.patch.object(convertor, "copy_companions", copying), place.refuses(CHANGED, target):
            call(str(folder), str(target))

    def notes(place: Place) -> None:
        place.with_notes()
        target = place.out.with_name("made")
        shutil.rmtree(place.out)
        call(str(source(place)), str(target))
        assert not [name for name in NOTES if (target / name).exists()]

    def empty_path(place: Place) -> None:
        for arguments in ((str(source(place)), ""), ("", str(place.out.with_name("made")))):
            with place.refuses(f"{EMPTY}|must have a save_path"):
                call(*arguments)

    lost = "its target is empty, or was made from the same source"
    return dict(zip(CHECKS, (empty_path, onto, changes, notes, lost), strict=True))


NO_PATH = "it takes no path"
ALWAYS_APART = "its target may not be a source at all"
NO_SOURCE = "it copies nothing but small files from another folder"
TABLE: dict[str, dict[str, Cell] | str] = {
    # public functions
    "build_model": not_a_writer(
        lambda place, path: mb.build_model(path, dims=ONE),
        lambda place, path: place.models(load_weights=path),
        changed=changed_while("mcore_bridge.weights.load.read", "hf", lambda place: place.models()),
    ),
    "build_draft": not_a_writer(lambda place, path: mb.build_draft(place.models(), path)),
    "drafting": NO_PATH,
    "load_hf_weights": not_a_writer(
        lambda place, path: mb.load_hf_weights(place.models(), path),
        lambda place, path: mb.load_hf_weights(place.models(), place.hf, hf=path),
        changed=changed_while("mcore_bridge.weights.load.read", "hf", loaded_later),
    ),
    "save_hf_checkpoint": saves(
        lambda place, path: mb.save_hf_checkpoint(place.models(), path),
        own=hf_over_its_source,
        changed=hf_from_a_whole_that_changes,
        notes=hf_notes,
        lost=hf_lost_bits,
    ),
    "save_hf_adapters": saves(
        lambda place, path: mb.save_hf_adapters(place.with_adapters(), path),
        own="a save over the adapter that was loaded is no mistake; see lost bits",
        changed=NO_SOURCE,
        notes=peft_notes,
        lost=peft_lost_bits,
    ),
    "load_adapters": not_a_writer(
        lambda place, path: mb.load_adapters(place.with_adapters(), path),
        changed=changed_while("mcore_bridge.weights.peft.hf_adapters.load_bound", "peft", with_loaded_adapters),
    ),
    "add_adapters": not_a_writer(
        lambda place, path: mb.add_adapters(place.models(), path),
        changed=changed_while("mcore_bridge.weights.peft.hf_adapters.load_bound", "peft", Place.with_adapters),
    ),
    "save_checkpoint": saves(
        lambda place, path: mb.save_checkpoint(place.models(), path),
        own=dist_over_its_source,
        changed=NO_SOURCE,
        notes=dist_notes,
        lost=dist_lost_bits,
    ),
    "load_checkpoint": not_a_writer(
        lambda place, path: mb.load_checkpoint(place.models(), path),
        changed=changed_while(
            "megatron.core.dist_checkpointing.load",
            "dist",
            lambda place: mb.load_checkpoint(place.models(), place.dist),
        ),
    ),
    "supports": dict.fromkeys(CHECKS, "it reads a config, and its answer has the error of a wrong path"),
    "mapping": not_a_writer(lambda place, path: mb.mapping(path)),
    "adopt": not_a_writer(lambda place, path: mb.adopt(place.models(), path)),
    "to_transformer_config": not_a_writer(lambda place, path: mb.to_transformer_config(path)),
    "to_gpt_arguments": not_a_writer(lambda place, path: mb.to_gpt_arguments(path)),
    "to_layer_spec": not_a_writer(lambda place, path: mb.to_layer_spec(path)),
    "iter_hf_weights": not_a_writer(lambda place, path: next(mb.iter_hf_weights(place.models(), hf=path))),
    "to_hf_state_dict": not_a_writer(lambda place, path: mb.to_hf_state_dict(place.models(), hf=path)),
    "iter_hf_shards": not_a_writer(lambda place, path: next(mb.iter_hf_shards(place.models(), hf=path))),
    "manifest": not_a_writer(lambda place, path: mb.manifest(place.models(), hf=path)),
    "Manifest": not_a_writer(
        lambda place, path: mb.Manifest.from_folder(path),
        changed=changed_while(
            "mcore_bridge.weights.manifest.digest", "hf", lambda place: mb.Manifest.from_folder(place.hf, digests=True)
        ),
    ),
    "EngineMap": not_a_writer(
        lambda place, path: mb.EngineMap.load(path), lambda place, path: mb.EngineMap((), (), (), ()).save(path)
    ),
    "export_into": not_a_writer(lambda place, path: mb.export_into(place.models(), None, hf=path)),
    "map_engine": "it takes an engine's process, and paths of none",
    **dict.fromkeys(
        [
            *(
                "ParallelDims",
                "CheckpointReport",
                "PendingSave",
                "engine_ranks",
                "EngineRank",
                "plan_buckets",
                "BufferRing",
            ),
            *("Receiver", "forward", "TokenOutputs", "log_probs", "pack_sequences", "unpack_sequences"),
            *("PackedSequences", "Adapters", "iter_hf_adapters", "without_adapters", "Architecture", "register"),
            "set_adapters",
            *("LoadReport", "BridgeError", "enable_cpu", "EngineWriter", "EngineWorker", "MappedEngine", "WeightSync"),
            *("vllm_source", "Support", "list_families", "show_progress"),
        ],
        NO_PATH,
    ),
    # the functions of the library that they call
    "api.convert": saves(
        lambda place, path: convert(place, path, place.out),
        lambda place, path: convert(place, place.hf, path),
        lambda place, path: convert(place, place.dist, place.out, hf=path),
        own=convert_onto_a_source,
        changed=convert_what_changes,
        notes=convert_notes,
        lost=ALWAYS_APART,
    ),
    "api.merge": saves(
        lambda place, path: merge(place, path, place.peft, place.out),
        lambda place, path: merge(place, place.hf, path, place.out),
        lambda place, path: merge(place, place.hf, place.peft, path),
        own=merge_onto_a_source,
        changed=merge_what_changes,
        notes=merge_notes,
        lost=ALWAYS_APART,
    ),
    "iter_mg_weights": not_a_writer(lambda place, path: next(iter_mg_weights(path))),
    # commands
    "verify": {
        "empty path": empty_options(
            lambda place: ("verify", ""),
            lambda place: ("verify", place.hf, "--against", ""),
            lambda place: ("verify", place.hf, "--save", ""),
            lambda place: ("verify", place.hf, "--adapter", ""),
        ),
        "target is source": verify_onto_a_source,
        "source changed": verify_what_changes,
        "notes on weights": "it writes by save_hf_checkpoint",
        "lost bits": ALWAYS_APART,
    },
    "plan": {
        "empty path": empty_options(
            lambda place: ("plan", ""), lambda place: ("plan", place.hf, "--picture", "", "--gpus", 1)
        ),
        **dict.fromkeys(CHECKS[1:], "it writes a picture alone"),
    },
    "convert": {
        "empty path": empty_options(
            lambda place: ("convert", "", place.out),
            lambda place: ("convert", place.hf, ""),
            lambda place: ("convert", place.dist, place.out, "--hf", ""),
        ),
        **dict.fromkeys(CHECKS[1:], "it is api.convert"),
    },
    "merge": {
        "empty path": empty_options(
            lambda place: ("merge", "", place.peft, place.out),
            lambda place: ("merge", place.hf, "", place.out),
            lambda place: ("merge", place.hf, place.peft, ""),
        ),
        **dict.fromkeys(CHECKS[1:], "it is api.merge"),
    },
    "draw": {
        "empty path": empty_options(lambda place: ("draw", "", place.out), lambda place: ("draw", place.hf, "")),
        "target is source": "it refuses a target with weights, and reads a config alone",
        "source changed": "it reads a config once",
        "notes on weights": "it refuses a target with weights",
        "lost bits": ALWAYS_APART,
    },
    "doctor": NO_PATH,
    # of RLinf
    "convert_hf_to_mg": rlinf(
        lambda source, target: convertor.convert_hf_to_mg(source, {"save_path": target}), lambda place: place.hf
    ),
    "convert_hf_to_middle_file": rlinf(
        lambda source, target: SCRIPTS["convert_hf_to_middle_file"](
            ConvertorSettings(load_path=source, save_path=target)
        ),
        lambda place: place.hf,
    ),
    "convert_middle_file_to_mg": rlinf(
        lambda source, target: SCRIPTS["convert_middle_file_to_mg"](
            ConvertorSettings(load_path=source, save_path=target)
        ),
        middle,
    ),
}


def test_every_entry_point_is_in_the_table() -> None:
    commands = {info.name for info in app.registered_commands}
    below = {"api.convert", "api.merge", "iter_mg_weights", "convert_hf_to_mg"}
    assert TABLE.keys() == {*mb.__all__, *engines.__all__, *commands, *below, *SCRIPTS}
    assert all(cells.keys() == {*CHECKS} for cells in TABLE.values() if not isinstance(cells, str))


@pytest.mark.parametrize(
    ("name", "check"),
    [
        (name, check)
        for name, cells in TABLE.items()
        if not isinstance(cells, str)
        for check, cell in cells.items()
        if not isinstance(cell, str)
    ],
)
def test_every_check_holds_for_every_entry_point(name: str, check: str, place: Place) -> None:
    cells = TABLE[name]
    assert not isinstance(cells, str)
    cell = cells[check]
    assert not isinstance(cell, str)
    cell(place)
