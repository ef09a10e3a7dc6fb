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

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_IMPORT = re.compile(r"^\s*from\s+(\.+)([\w.]*)\s+import\s+(\([^)]*\)|[^\n]+)", re.MULTILINE)
_OF_A_FAMILY = ("configuration_", "modeling_")
_NOT_OF_FORWARD = re.compile(r"(generation|quantizers)/|trainer|training_args|integrations/integration_utils")
"""Modules whose settings are for ``generate()``, for quantized modules, which we never build, or for a ``Trainer``."""
_NOT_OF_MODELS = frozenset(
    (
        *("GenericForTokenClassification", "GenericForQuestionAnswering", "_expand_multimodal_outputs"),
        *("__getattr__", "__getattribute__", "__setattr__"),
    )
)
"""Classes of heads that we never build, a step of ``generate()``, and methods of configs that only pass values on."""
_WHOLE = frozenset({"to_dict", "to_diff_dict", "__dict__"})


def fields_read(config: "type[PretrainedConfig]", names: Iterable[str]) -> frozenset[str]:
    """Select the ``names`` that the installed transformers may read from a config of this class.

    If the class is not from transformers, any code may read it, so all names count as read. This also holds for a
    family without its own model.

    Example::

        >>> from transformers import LlamaConfig
        >>> sorted(fields_read(LlamaConfig, ["hidden_size", "unk_token_id"]))
        ['hidden_size']
    """
    names = frozenset(names)
    package = _package_of(config)
    if package is None or not any(package.glob("modeling_*.py")):  # with a model of another family, found by a list
        return names
    return _read_by_family(package, frozenset(base.__name__ for base in config.__mro__), names)


@functools.cache
def _read_by_family(package: Path, classes: frozenset[str], names: frozenset[str]) -> frozenset[str]:
    """``fields_read`` for a config with these classes in its MRO. Cached, since a build calls it several times."""
    own, shared = _code_of(package)
    if any(_reads_unnamed_fields(path) for path in own):
        return names
    return frozenset(
        name
        for name in names
        if any(_is_in_family(path, name) for path in own) or any(_is_in_shared(path, name, classes) for path in shared)
    )


@functools.cache
def _root() -> Path:
    import transformers

    return Path(transformers.__file__).parent


def _package_of(config: "type[PretrainedConfig]") -> Path | None:
    """The folder of a family; None if the class is not from transformers."""
    match config.__module__.split("."):
        case ["transformers", "models", *folders, _]:
            return _root().joinpath("models", *folders)
    return None


@functools.cache
def _code_of(package: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """All modules that the code of a family imports, including its own: modules of families, and shared modules."""
    waiting = [path for prefix in _OF_A_FAMILY for path in package.glob(f"{prefix}*.py")]
    modules: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in modules:
            modules.add(path)
            waiting += _imported_by(path)
    own = {path for path in modules if _is_of_family(path)}
    return tuple(sorted(own)), tuple(sorted(modules - own))


def _is_of_family(path: Path) -> bool:
    return path.is_relative_to(_root() / "models")


def _imported_by(path: Path) -> Iterator[Path]:
    """The modules of transformers that ``path`` imports, at any level of its code.

    Shared modules and the package ``auto`` import families only to choose one by its name.
    """
    for module in _imports(path):
        if not _is_of_family(module):
            if not _NOT_OF_FORWARD.match(module.relative_to(_root()).as_posix()):
                yield module
        elif _is_of_family(path) and module.parent.name != "auto" and module.name.startswith(_OF_A_FAMILY):
            yield module


@functools.cache
def _imports(path: Path) -> tuple[Path, ...]:
    statements = _IMPORT.findall(_text(path))
    return tuple(
        module
        for dots, name, imported in statements
        for module in _modules(path.parents[len(dots) - 1], name, frozenset(re.findall(r"\w+", imported)))
    )


def _modules(base: Path, name: str, imported: frozenset[str]) -> Iterator[Path]:
    """The modules that define ``imported``. For a package, these are the modules from which it imports the names."""
    target = base.joinpath(*name.split(".")) if name else base
    if name and (module := target.with_suffix(".py")).exists():
        yield module
    elif (package := target / "__init__.py").exists():
        yield from (path for word in imported if (path := target / f"{word}.py").exists())
        for _, inner, words in _IMPORT.findall(_text(package)):
            if inner and (taken := imported.intersection(re.findall(r"\w+", words))):
                yield from _modules(target, inner, taken)


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(_reading(ast.parse(_text(path))))


def _reading(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all nodes inside of it, without code that reads no field for a model that we build."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in _NOT_OF_MODELS):
            yield node
            waiting += ast.iter_child_nodes(node)


def _is_in_family(path: Path, name: str) -> bool:
    """Whether a module of a family reads the field, or contains its name in quotes.

    The variable of a config may have any name, so attributes of all variables count, except ``self`` in a module.
    """
    if name not in _text(path):  # quick, and usually enough
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
    if name not in _text(path):
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
    if not re.search(r"attr\([^()]*,\s*f[\"']", _text(path)):
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
    return any(map(_is_read_of_unnamed, _nodes(path)))


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
    paths = (path for path in _root().rglob("*.py") if not _is_of_family(path))
    return frozenset(
        name.lower() for path in paths for name in re.findall(r"^class (\w*Config\w*)", _text(path), re.MULTILINE)
    ) - {"pretrainedconfig"}


def _is_self(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id == "self"
