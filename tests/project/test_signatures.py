"""The page of Python answers for each public name: what it takes, what it returns, what it raises.

The site's build holds the rest: it fails if a signature names a type of ours that the page does not describe.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import mcore_bridge as mb
from mcore_bridge import engines

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/reference/api.md").read_text()
NAMES = {name: getattr(home, name) for home in (mb, engines) for name in home.__all__}
FUNCTIONS = {name: value for name, value in NAMES.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in NAMES.items() if inspect.isclass(value)}
OTHERS = {
    *("Any", "Callable", "Generator", "Iterable", "Iterator", "Literal", "Mapping", "None", "Sequence", "Collection"),
    *("bool", "dict", "float", "frozenset", "int", "list", "object", "range", "set", "slice", "str", "tuple", "type"),
    *("GPTModel", "PackedSeqParams", "Path", "PathLike", "PretrainedConfig", "ProcessGroup", "Tensor", "device"),
    *("TransformerBlockSubmodules", "TransformerConfig", "bytes", "dtype", "nn", "Module", "os", "timedelta", "torch"),
    *("TracebackType", "BaseException", "Self", "Shaped", "T"),
}
"""Types of Python and of other libraries."""


def section(doc: str, *titles: str) -> str:
    match = re.search(rf"(?m)^(?:{'|'.join(titles)}):\n((?:(?: .*)?\n)*)", f"{doc}\n")
    return match[1] if match else ""


def entries(doc: str) -> set[str]:
    """The names before the colons of ``Args`` and ``Attributes``."""
    listed = re.findall(r"(?m)^    ([\w*, ]+):", section(doc, "Args", "Attributes"))
    return {name.strip(" *") for names in listed for name in names.split(",")}


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods that the class has itself, apart from what only its own kind of process calls."""
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if (
            inspect.isfunction(function)
            and function.__name__ == name
            and (not name.startswith(("_", "ask_")) or name == "__call__")
        ):
            yield f"{kind.__name__}.{name}", function


CALLS = {**FUNCTIONS, **{name: method for kind in CLASSES.values() for name, method in methods(kind)}}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_what_it_takes_returns_and_raises(name: str) -> None:
    call = CALLS[name]
    doc, signature = inspect.getdoc(call) or "", inspect.signature(call)
    taken = signature.parameters.keys() - {"self", "cls"}
    if name in FUNCTIONS or entries(doc):
        assert taken <= entries(doc) or (not entries(doc) and len(taken) <= 1)
        nothing = signature.return_annotation in ("None", None, "Iterator[None]")
        assert nothing or section(doc, "Returns", "Yields")
    assert doc
    assert not taken or name not in FUNCTIONS or section(doc, "Raises") or "No error is raised" in doc


def described() -> set[str]:
    """The last names of what the page describes."""
    listed = re.findall(r"(?m)^(?:\.\. auto\w+::|  ) ([\w.]+)(?:\(\))?$", PAGE)
    return {path.rpartition(".")[2] for path in listed}


def classes_on_the_page() -> dict[str, type]:
    paths = re.findall(r"(?m)^\.\. autoclass:: (mcore_bridge[\w.]+)", PAGE)
    further = [path.rpartition(".") for path in paths]
    return CLASSES | {name: getattr(importlib.import_module(module), name) for module, _, name in further}


@pytest.mark.parametrize("name", sorted(CLASSES | FUNCTIONS))
def test_each_type_in_a_signature_is_on_the_page(name: str) -> None:
    calls = [CALLS[call] for call in CALLS if call == name or call.startswith(f"{name}.")]
    texts = [text for call in calls for text in inspect.get_annotations(call).values() if isinstance(text, str)]
    named = {
        node.id if isinstance(node, ast.Name) else node.attr
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    assert named - OTHERS - described() == set()


@pytest.mark.parametrize("name", classes_on_the_page())
def test_each_field_is_described(name: str) -> None:
    kind = classes_on_the_page()[name]
    if not is_dataclass(kind):
        return
    told = {name for base in kind.__mro__ if base is not object for name in told_by(base)}
    assert {field.name for field in fields(kind) if not field.name.startswith("_")} <= told


def told_by(kind: type) -> Iterator[str]:
    """The fields that its docstring describes, and those with a docstring of their own."""
    yield from entries(inspect.getdoc(kind) or "")
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            yield node.target.id
