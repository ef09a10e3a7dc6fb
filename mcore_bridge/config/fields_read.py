"""Finds the fields of an HF config that the code of transformers may read. A field that no code reads changes nothing.

It searches the source text of the installed release, without importing or running it. It searches the family's
configuration and modelling modules, and modules of other families that these import. The shared modules (rope, masks,
attention, the base classes) are searched as well. A case that cannot be decided counts as read.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_bridge.config.family_code import MODEL, code_of, is_of_family, modules_in, packages_of, root, text

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NOT_OF_MODELS = frozenset(
    (
        *("GenericForTokenClassification", "GenericForQuestionAnswering", "_expand_multimodal_outputs"),
        *("__getattr__", "__getattribute__", "__setattr__"),
    )
)
"""Classes of heads that we never build, a step of ``generate()``, and methods of configs that only pass values on."""
_WHOLE = frozenset({"to_dict", "to_diff_dict", "__dict__"})
_UNNAMED = re.compile("|".join((*_WHOLE, "vars", "getattr")))
"""What the text of a module contains if it reads fields without their names."""


def readers_of(config: "type[PretrainedConfig]", names: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Select the ``names`` that code of families may read from a config of this class, and those that only shared
    modules may read.

    If the class is not from transformers, any code may read it, so all names count as read.
    The modules of a family are in the folder of its config. A family without a model of its own also has the modules of
    the class that ``AutoModelForCausalLM`` gives for it.
    """
    names = frozenset(names)
    packages = packages_of(config)
    if not any(modules_in(package, MODEL) for package in packages):
        return names, frozenset()
    return _read_by_family(packages, frozenset(base.__name__ for base in config.__mro__), names)


def quoted_by_family(config: "type[PretrainedConfig]", names: Iterable[str]) -> frozenset[str]:
    """Select the ``names`` that code of the family has in quotes, for any use, such as keys of its rope parameters."""
    own, _ = code_of(packages_of(config))
    return frozenset(name for name in names if not own or any(_has_quoted(path, name) for path in own))


def _has_quoted(path: Path, name: str) -> bool:
    return any(f"{quote}{name}{quote}" in text(path) for quote in ("'", '"'))


@functools.cache
def _read_by_family(
    packages: tuple[Path, ...], classes: frozenset[str], names: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """``readers_of`` for a config with these classes in its MRO. Cached, since a build calls it several times."""
    own, shared = code_of(packages)
    if any(_reads_unnamed_fields(path) for path in own):
        return names, frozenset()
    of_family = frozenset(name for name in names if any(_is_in_family(path, name) for path in own))
    rest = names - of_family
    return of_family, frozenset(name for name in rest if any(_is_in_shared(path, name, classes) for path in shared))


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(_reading(ast.parse(text(path))))


def _reading(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all nodes inside of it, without code that reads no field for a model that we build."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.ClassDef() | ast.FunctionDef() if node.name in _NOT_OF_MODELS:
                continue
            case ast.Subscript(value=ast.Attribute(attr="rope_parameters" | "rope_scaling")):  # its key is no field
                waiting.append(node.value)
            case _:
                yield node
                waiting += ast.iter_child_nodes(node)


def _is_in_family(path: Path, name: str) -> bool:
    """Whether a module of a family reads the field, or contains its name in quotes.

    The variable of a config may have any name, so attributes of all variables count, except ``self`` in a module.
    """
    if name not in text(path):  # quick, and usually enough
        return False
    return any(
        _is_quoted(node, name)
        or _is_attribute(node, name, lambda owner: not _is_self(owner))
        or (isinstance(node, ast.ClassDef) and "Config" in node.name and _is_read_by(node, name))
        for node in _nodes(path)
    )


def _is_in_shared(path: Path, name: str, classes: frozenset[str]) -> bool:
    """Whether a shared module reads the field from a config, or one of the base classes ``classes`` does.

    Names in quotes count if the module reads fields by names that it receives.
    """
    if any(pattern.fullmatch(name) for pattern in _spelled_fields(path)):
        return True
    if name not in text(path):
        return False
    by_given_names = _reads_unnamed_fields(path)
    return any(
        _is_asked_for(node, name)
        or _is_attribute(node, name, _is_model_config)
        or (by_given_names and _is_quoted(node, name))
        or (isinstance(node, ast.ClassDef) and node.name in classes and _is_read_by(node, name))
        for node in _nodes(path)
    )


@functools.cache
def _spelled_fields(path: Path) -> tuple[re.Pattern[str], ...]:
    """Patterns of the field names that a module composes before it reads them from a config."""
    if not re.search(r"attr\([^()]*,\s*f[\"']", text(path)):
        return ()
    return tuple(re.compile(pattern) for node in _nodes(path) for pattern in _asked_for_by_parts(node))


def _asked_for_by_parts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.JoinedStr(values=parts), *_]):
            if _is_model_config(owner):
                yield "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts)


@functools.cache
def _reads_unnamed_fields(path: Path) -> bool:
    """Whether a module reads all fields of a config, or a field whose name comes from other code."""
    return bool(_UNNAMED.search(text(path))) and any(map(_is_read_of_unnamed, _nodes(path)))


def _is_read_of_unnamed(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=owner, attr=name):
            return name in _WHOLE and _is_model_config(owner)
        case ast.Call(func=ast.Name(id="vars"), args=[owner]):
            return _is_model_config(owner)
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, name, *_]):
            return not isinstance(name, ast.Constant) and _is_model_config(owner)
    return False


def _is_attribute(node: ast.AST, name: str, is_config: Callable[[ast.expr], bool]) -> bool:
    match node:
        case ast.Attribute(value=owner, attr=attribute, ctx=ast.Load()):
            return attribute == name and is_config(owner)
    return False


def _is_quoted(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == name


def _is_asked_for(node: ast.AST, name: str) -> bool:
    """Whether ``node`` reads a field from a config by its name in quotes."""
    match node:
        case (
            ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=value), *_])
            | ast.Call(func=ast.Attribute(value=owner, attr="get" | "pop"), args=[ast.Constant(value=value), *_])
        ):
            return value == name and _is_model_config(owner)
    return False


def _is_read_by(config_class: ast.AST, name: str) -> bool:
    """Whether a config class does more with the field than store it, or pass it on under its name."""
    kept, used = set[ast.expr](), set[ast.expr]()
    for node in ast.walk(config_class):
        match node:
            case ast.Attribute(value=owner, attr=attribute, ctx=ast.Load()) if attribute == name and _is_self(owner):
                return True
            case ast.Call(args=[ast.Constant(value=value), *_]) if value == name:  # kwargs.pop(name)
                return True
            case ast.Assign(targets=[ast.Attribute(attr=attribute)], value=value) if attribute == name:
                kept.add(value)
            case ast.keyword(arg=argument, value=value) if argument == name:
                kept.add(value)
            case ast.Name(id=identifier, ctx=ast.Load()) if identifier == name:
                used.add(node)
    return not used <= kept


def _is_model_config(owner: ast.expr) -> bool:
    """Whether an expression is named like the config of a model, such as ``self.config`` or ``text_config``.

    Variables of other configs have the names of their classes, such as ``generation_config``.
    """
    match owner:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lower().endswith("config") and not _is_of_another_class(name)
        case ast.Call(func=function):
            return _is_model_config(function)
    return False


@functools.cache
def _is_of_another_class(name: str) -> bool:
    """Whether ``name`` is how a shared class of configs is spelled for its instances, other than the base class."""
    spelled = name.lower().replace("_", "")
    return spelled != "config" and any(other.startswith(spelled) for other in _shared_config_classes())


@functools.cache
def _shared_config_classes() -> frozenset[str]:
    paths = (path for path in root().rglob("*.py") if not is_of_family(path))
    return frozenset(
        name.lower() for path in paths for name in re.findall(r"^class (\w*Config\w*)", text(path), re.MULTILINE)
    ) - {"pretrainedconfig"}


def _is_self(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id == "self"
