"""Finds the code of transformers that computes a family: the modules of its config and model, and all they import.

It reads the source text of the installed release, without importing or running it.
"""

import functools
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MODEL = "modeling_"
_IMPORT = re.compile(r"^\s*from\s+(\.+)([\w.]*)\s+import\s+(\([^)]*\)|[^\n]+)", re.MULTILINE)
_OF_A_FAMILY = ("configuration_", MODEL)
_NOT_OF_FORWARD = re.compile(r"(generation|quantizers)/|trainer|training_args|integrations/integration_utils")
"""Modules whose settings are for ``generate()``, for quantized modules, which we never build, or for a ``Trainer``."""


@functools.cache
def root() -> Path:
    import transformers

    return Path(transformers.__file__).parent


def packages_of(config: "type[PretrainedConfig]") -> tuple[Path, ...]:
    """The folders of a family: of its config, and of its model if that is a model of another family.

    Empty if the class is not from transformers.
    """
    match config.__module__.split("."):
        case ["transformers", "models", *folders, _]:
            own = root().joinpath("models", *folders)
            borrowed = () if modules_in(own, MODEL) else _folders_of_model(config.model_type)
            return (own, *borrowed)
    return ()


@functools.cache
def _folders_of_model(model_type: str) -> tuple[Path, ...]:
    """The folder that defines the class of a family's causal LM: the folder of the family that has it by itself."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    users = (name for name, model in CLASSES.items() if model == CLASSES.get(model_type))
    folders = (root() / "models" / model_type_to_module_name(name) for name in users)
    definition = f"class {CLASSES.get(model_type)}("
    defines = (folder for folder in folders if any(definition in text(path) for path in modules_in(folder, MODEL)))
    return tuple(islice(defines, 1))


@functools.cache
def modules_in(package: Path, prefix: str) -> tuple[Path, ...]:
    return tuple(sorted(package.glob(f"{prefix}*.py")))


@functools.cache
def code_of(packages: tuple[Path, ...]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """All modules that the code of a family imports, including its own: modules of families, and shared modules.

    Of several packages, the first one has the config, and the others have the model.
    """
    waiting = [path for package in packages for prefix in _OF_A_FAMILY for path in modules_in(package, prefix)]
    modules: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in modules:
            modules.add(path)
            waiting += _imported_by(path)
    own = {path for path in modules if is_of_family(path)}
    return tuple(sorted(own)), tuple(sorted(modules - own))


@functools.cache
def is_of_family(path: Path) -> bool:
    return path.is_relative_to(root() / "models")


@functools.cache
def _imported_by(path: Path) -> tuple[Path, ...]:
    """The modules of transformers that ``path`` imports, at any level of its code.

    Shared modules and the package ``auto`` import families only to choose one by its name.
    """
    taken = (_is_shared, _is_own) if is_of_family(path) else (_is_shared,)
    return tuple(module for module in _imports(path) if any(accepts(module) for accepts in taken))


def _is_shared(module: Path) -> bool:
    return not is_of_family(module) and not _NOT_OF_FORWARD.match(module.relative_to(root()).as_posix())


def _is_own(module: Path) -> bool:
    return is_of_family(module) and module.parent.name != "auto" and module.name.startswith(_OF_A_FAMILY)


@functools.cache
def _imports(path: Path) -> tuple[Path, ...]:
    return tuple(
        module
        for dots, name, imported in _statements(path)
        for module in _modules(path.parents[len(dots) - 1], name, imported)
    )


@functools.cache
def _statements(path: Path) -> tuple[tuple[str, str, frozenset[str]], ...]:
    """The relative imports of a file: the dots, the module behind them, and the words of what is imported."""
    statements = _IMPORT.findall(text(path))
    return tuple((dots, name, frozenset(re.findall(r"\w+", words))) for dots, name, words in statements)


def _modules(base: Path, name: str, imported: frozenset[str]) -> Iterator[Path]:
    """The modules that define ``imported``. For a package, these are the modules from which it imports the names."""
    target = base.joinpath(*name.split(".")) if name else base
    if name and (module := target.with_suffix(".py")).exists():
        yield module
    elif (package := target / "__init__.py").exists():
        yield from (path for word in imported if (path := target / f"{word}.py").exists())
        for _, inner, words in _statements(package):
            if inner and (taken := imported & words):
                yield from _modules(target, inner, taken)


@functools.cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
