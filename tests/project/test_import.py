"""Importing the library is fast and changes nothing. The modules of the library import each other in one direction."""

import ast
import functools
import json
import subprocess
import sys

import pytest

import mcore_bridge
from mcore_bridge import engines, errors
from tests.support.house import MODULES, PACKAGE, ROOT, import_graph, imports, module_of

ORDER = """
errors <- arguments cpu foreign_files installed machine <- rules config <- composite <- architecture <- weights models
<- batches <- factory <- engines <- sync <- launch <- convert <- trainers commands <- cli
"""
INSIDE = {
    "config": "tables <- mesh",
    "weights": "plan <- transfer <- ipc <- engine <- files <- source <- dist_checkpoint",
}
"""A module imports only from entries further left, or from its own folder. The same order holds in a folder."""

DISTRIBUTED = {
    "batches/text_collectives.py",
    "commands/verify/logits.py",
    "config/mesh/alike.py",
    "config/mesh/lost_ranks.py",
    "config/mesh/process_groups.py",
    "convert/convert.py",
    "engines/joint_group.py",
    "launch/fake_rank.py",
    "launch/worker.py",
    "weights/transfer/collectives.py",
}
"""The files that touch torch.distributed."""
FILES = {f"weights/dist_checkpoint/{name}.py" for name in ("dist_writer", "folder", "files", "metadata")}
"""These files use only ``torch.distributed.checkpoint``, torch's module for this format of files."""

WATCH = """
import json, sys, types
import torch, transformers, megatron.core
import megatron.core.models.gpt, megatron.core.parallel_state, megatron.core.tensor_parallel.random
import transformers.models.llama.modeling_llama

def loaded():
    return {name: module for name, module in sys.modules.items()
            if name.partition(".")[0] in ("torch", "transformers", "megatron") and isinstance(module, types.ModuleType)}

def snapshot():
    seen = {}
    for name, module in loaded().items():
        for key, value in list(vars(module).items()):
            seen[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] in ("torch", "transformers", "megatron"):
                seen.update({f"{name}.{key}.{attribute}": held for attribute, held in list(vars(value).items())})
    return seen

nothing = object()
before_modules, before = set(sys.modules), snapshot()
for action in json.loads(sys.argv[1]):
    exec(action)
    after = snapshot()
    new = sorted(name for name in set(sys.modules) - before_modules)
    changed = sorted(n for n in {*before, *after} if before.get(n, nothing) is not after.get(n, nothing))
    print("FOUND", json.dumps({"new": new, "changed": changed, "watched": len(before),
                               "cuda": torch.cuda.is_initialized(), "group": torch.distributed.is_initialized()}))
    before_modules, before = set(sys.modules), after
"""
IMPORT = "import mcore_bridge"
USE_ALL = "for name in mcore_bridge.__all__: getattr(mcore_bridge, name)"
PLANTED = "megatron.core.parallel_state.get_tensor_model_parallel_rank = None; torch.nn.Linear.forward = None"


@functools.cache
def watched() -> dict[str, dict[str, list[str] | int | bool]]:
    """The result of each action, one after the other in a fresh process that has imported the libraries."""
    actions = [IMPORT, USE_ALL, PLANTED]
    command = [sys.executable, "-W", "ignore", "-c", WATCH, json.dumps(actions)]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr
    found = [json.loads(line[6:]) for line in finished.stdout.splitlines() if line.startswith("FOUND ")]
    return dict(zip(actions, found, strict=True))


def foreign(modules: object) -> list[str]:
    """Modules from outside this package and the standard library."""
    assert isinstance(modules, list)
    known = {"mcore_bridge", *sys.stdlib_module_names}
    return [name for name in modules if name.partition(".")[0] not in known]


def test_importing_brings_no_other_module() -> None:
    found = watched()[IMPORT]
    assert foreign(found["new"]) == []
    assert found["new"] == ["mcore_bridge"]


def test_importing_changes_nothing() -> None:
    found = watched()[IMPORT]
    assert isinstance(found["watched"], int)
    assert found["watched"] > 10_000
    assert found["changed"] == []
    assert not found["cuda"]
    assert not found["group"]


def test_using_every_name_changes_nothing_and_brings_little() -> None:
    found = watched()[USE_ALL]
    assert {name.partition(".")[0] for name in foreign(found["new"])} <= {"safetensors", "einops"}
    assert found["changed"] == []


def test_a_change_would_be_seen() -> None:
    changed = watched()[PLANTED]["changed"]
    assert isinstance(changed, list)
    assert "megatron.core.parallel_state.get_tensor_model_parallel_rank" in changed
    assert "torch.nn.Linear.forward" in changed


@pytest.mark.parametrize(
    ("blocked", "action"),
    [
        (("transformer_engine", "apex", "megatron", "transformers"), f"import mcore_bridge\n{USE_ALL}"),
        (
            ("megatron", "transformers", "einops", "safetensors", "accelerate"),  # an engine's process has torch alone
            "import mcore_bridge.engines as engines, mcore_bridge.engines.vllm, mcore_bridge.engines.sglang\n"
            "for name in {*engines.__all__} - {*engines.OF_TRAINER}: getattr(engines, name)",
        ),
    ],
    ids=["everything", "engines"],
)
def test_importing_needs_few_packages(blocked: tuple[str, ...], action: str) -> None:
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {blocked}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"{action}\n"
    )
    finished = subprocess.run([sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr


# the source -----------------------------------------------------------------------------------------------------------


def folders(graph: dict[str, set[str]], depth: int) -> dict[str, set[str]]:
    """The graph of folders ``depth`` deep, and of the modules above them."""
    merged: dict[str, set[str]] = {}
    for module, targets in graph.items():
        name, *others = ("/".join(each.split("/")[:depth]) for each in (module, *targets))
        merged.setdefault(name, set()).update(set(others) - {name})
    return merged


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The strongly connected components of a graph that contain a circle, as text."""
    reached = {}
    for start in graph:
        reached[start], waiting = set[str](), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - reached[start]
            reached[start] |= new
            waiting.extend(new)
    return {" ".join(sorted(m for m in reached[n] if n in reached[m])) for n in graph if n in reached[n]}


def test_no_modules_or_folders_import_each_other() -> None:
    graph = import_graph()
    assert all(targets <= graph.keys() for targets in graph.values())
    found = {circle for depth in (1, 2, 3, 4) for circle in circles(folders(graph, depth))}
    assert found == set()


def test_a_circle_would_be_seen() -> None:
    graph = {"a/x": {"b/y"}, "b/y": {"b/z"}, "b/z": {"c"}, "b/v": {"a/w"}, "a/w": set(), "c": {"d"}, "d": {"b/y"}}
    assert circles(graph) == {"b/y b/z c d"}
    assert circles(folders(graph, 1)) == {"a b c d"}


def test_names_for_type_checkers_are_those_of_the_table() -> None:
    package = PACKAGE / "__init__.py"
    typed = set(imports(package, types=True)) - set(imports(package))
    assert typed == {f"mcore_bridge.{home}.{name}" for name, home in mcore_bridge._HOMES.items()}


def test_names_for_authors_of_engines_have_two_homes_and_one_page() -> None:
    moved = mcore_bridge._HOMES.keys() - {*mcore_bridge.__all__} - mcore_bridge._ERRORS
    assert moved == {*engines.__all__} - {"EngineWorker", "MappedEngine"}
    assert all(getattr(mcore_bridge, name) is getattr(engines, name) for name in moved)


def test_every_error_is_in_the_package_and_a_wrong_name_has_a_hint() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and "Error" in name}
    assert all(getattr(mcore_bridge, name) is kind for name, kind in kinds.items())
    assert kinds.keys() - {"BridgeError"} == mcore_bridge._ERRORS
    meant_by = {"build_models": "build_model", "AutoBridge": "build_model, or", "MeshErorr": "MeshError"}
    for name, meant in meant_by.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': do you mean {meant}"):
            getattr(mcore_bridge, name)
    with pytest.raises(AttributeError, match=r"no attribute '__wrapped__'$"):
        getattr(mcore_bridge, "__wrapped__")  # noqa: B009
    with pytest.raises(AttributeError, match=r"no attribute 'xyz'$"):
        getattr(mcore_bridge, "xyz")  # noqa: B009


def test_no_public_name_is_a_module() -> None:
    """The first import of such a module would replace the public function of that name."""
    assert not set(mcore_bridge.__all__) & {module_of(path).split("/")[0] for path in MODULES}


def levels(order: str) -> dict[str, int]:
    """The place of each name in an order."""
    return {name: place for place, names in enumerate(order.split("<-")) for name in names.split()}


def upwards(graph: dict[str, set[str]], order: str, folder: str = "") -> list[str]:
    """The imports of modules that are not further left in the order of a folder."""
    places = levels(order)
    inside = [(name, target) for name in graph for target in graph[name] if name.startswith(folder)]
    found = []
    for module, target in inside:
        here, there = (name.removeprefix(folder).split("/")[0] for name in (module, target))
        ordered = target.startswith(folder) and {here, there} <= places.keys()
        if ordered and here != there and places[there] >= places[here]:
            found.append(f"{module} imports {target}")
    return sorted(found)


def test_imports_run_one_way() -> None:
    graph = import_graph()
    assert {name.split("/")[0] for name in graph} == levels(ORDER).keys()
    assert upwards(graph, ORDER) == []
    assert [line for folder, order in INSIDE.items() for line in upwards(graph, order, f"{folder}/")] == []


def test_an_import_the_other_way_would_be_seen() -> None:
    graph = {"rules/x": {"config/y", "models/z"}, "models/z": {"rules/x"}, "weights/plan/a": {"weights/files/b"}}
    assert upwards(graph, ORDER) == ["rules/x imports config/y", "rules/x imports models/z"]
    assert upwards(graph, INSIDE["weights"], "weights/") == ["weights/plan/a imports weights/files/b"]


def test_rooms_that_others_read_alone_import_little() -> None:
    graph = import_graph()
    for room, allowed in {
        "rules": {"errors"},
        "weights/ipc": {
            *("errors", "arguments", "rules/names", "rules/scheme", "rules/spec"),
            "weights/transfer/copier",
        },
        "weights/engine": {
            *("errors", "arguments", "rules/spec", "weights/ipc", "weights/plan/boxes", "weights/plan/engine_map"),
            *("weights/plan/map_slices", "weights/transfer/copier"),
        },
        "models": {"architecture", "composite", "config", "errors", "rules"},
    }.items():
        inside = {name for name in graph if f"{name}/".startswith(f"{room}/")}
        with_trainer = {f"weights/engine/{name}" for name in ("across_ranks", "composed", "pull_writer", "writer")}
        for name in sorted(inside - with_trainer):  # they run in the trainer's process
            for target in graph[name] - inside:
                above = ("/".join(target.split("/")[:depth]) for depth in (1, 2, 3))
                assert not allowed.isdisjoint(above), f"{name} imports {target}"


def test_no_test_imports_from_a_test() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        names = [name for module in imports(path) if module.startswith("tests.") for name in module.split(".")]
        assert not [name for name in names if name.startswith("test_")], path


def test_only_few_modules_know_of_processes() -> None:
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for module in imports(path):
            if f"{module}.".startswith("torch.distributed."):
                kind = "files" if module.startswith("torch.distributed.checkpoint.") else "processes"
                found.setdefault(kind, set()).add(str(path.relative_to(PACKAGE)))
    assert found["processes"] == DISTRIBUTED
    assert found["files"] == FILES


def test_one_module_reads_json() -> None:
    """So each JSON file of another program has a limit of size, is no FIFO, and raises if readers may differ."""
    calls = [
        (module_of(path), ast.unparse(node))
        for path in MODULES
        if "json" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.load", "json.loads"))
        or (isinstance(node, ast.ImportFrom) and node.module == "json")
    ]
    assert calls == [("foreign_files", "json.loads")]


def test_sources_are_ascii_and_name_no_place_of_a_machine() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in MODULES}
    places = ("/home/", "/root/", "/tmp/", "/work/", "/Users/")
    assert [path for path, text in texts.items() if not text.isascii()] == []
    assert [(path, place) for path, text in texts.items() for place in places if place in text] == []
