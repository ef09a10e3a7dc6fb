"""Prose is understood at first sight: sentences are short, and names that do not describe a value are not used.

A sentence ends with a full stop, a question mark or an exclamation mark. The end of a paragraph or of an entry of a
list ends it, too. Code counts as one word: a span in backticks, a list of such spans, a link's address, and the value
in an f-string. Blocks of code, tables, headings, doctests and the names before the colons of ``Args:`` are left out.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "mcore_bridge"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("changelog.d/*.md")),
]

MOST_WORDS = 30
VAGUE = frozenset({"found", "each", "many", "noted", "told"})
"""A participle or a quantity does not describe a value."""

LONG: tuple[str, ...] = ()
"""The beginnings of sentences that may be longer."""

CODE = "CODE"
_SPAN = re.compile(r"``[^`]*``|`[^`]*`|\]\([^)]*\)|<?https?://\S+")
_LIST = re.compile(rf"{CODE}(?:\s*,?\s+(?:and |or )?{CODE})+")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_ARGUMENT = re.compile(r"\s*\*{0,2}\w+: +")
_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!\.\.)[.!?][)\"'*]*(?=\s|$)")
_SECTIONS = ("Args:", "Raises:", "Returns:", "Yields:", "Example:", "Attributes:")
_DIRECTIVES = ("type:", "noqa", "fmt:", "pragma", "mypy:", "SPDX", "ruff:")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring, a comment or a page."""
    for paragraph in paragraphs(text):
        words = _LIST.sub(CODE, _SPAN.sub(f" {CODE} ", paragraph))
        yield from (sentence.strip() for sentence in _END.split(words) if sentence.strip())


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs. Blank lines, entries of lists and sections of docstrings separate them; code is left out."""
    lines: list[str] = []
    fenced = sample = section = False
    for line in [*text.expandtabs().splitlines(), ""]:
        stripped = line.strip()
        fenced ^= stripped.startswith("```")
        section = stripped in _SECTIONS or (section and bool(stripped))
        sample = stripped.startswith(">>>") or (sample and bool(stripped))
        skipped = fenced or sample or stripped in _SECTIONS or stripped.startswith(("```", "|", "#", "<", "!["))
        entry = _ITEM.match(line) or (_ARGUMENT.match(line) if section else None)
        if lines and (skipped or entry or not stripped):
            yield " ".join(lines)
            lines = []
        if stripped and not skipped:
            lines.append(line[entry.end() :].strip() if entry else stripped)


def module_texts(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and other strings of a module, with their lines; neighbouring comments are one text."""
    tree = ast.parse(source)
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for string in joined for part in string.values}
    for string in joined:
        if id(string) not in parts:
            yield (
                string.lineno,
                "".join(part.value if isinstance(part, ast.Constant) else CODE for part in string.values),
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("# ")
        if token.type != tokenize.COMMENT or text.startswith(_DIRECTIVES):
            continue
        if comments and comments[-1][0] + 1 == token.start[0] and not token.line[: token.start[1]].strip():
            comments[-1] = (token.start[0], f"{comments[-1][1]}\n{text}")
        else:
            comments.append((token.start[0], text))
    yield from comments


def long_sentences(texts: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    return [
        (line, sentence)
        for line, text in texts
        for sentence in sentences(text)
        if len(re.findall(r"\S*\w\S*", sentence)) > MOST_WORDS
    ]


def names(source: str) -> Iterator[tuple[int, str]]:
    """Every name that a module defines or uses: variables, arguments, attributes, functions and classes."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "arg", "attr", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), name


def vague_names(source: str) -> list[str]:
    return sorted({f"{line}: {name}" for line, name in names(source) if name in VAGUE})


def page_texts(path: Path) -> Iterator[tuple[int, str]]:
    yield 1, path.read_text(encoding="utf-8")


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    return module_texts(path.read_text(encoding="utf-8")) if path.suffix == ".py" else page_texts(path)


FILES = [*MODULES, *PAGES]


def test_no_sentence_is_long() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in FILES
        for line, sentence in long_sentences(texts_of(path))
        if not sentence.startswith(LONG or ("\0",))
    ]
    assert not too_long, "\n".join(too_long)


def test_every_exception_is_still_needed() -> None:
    text = [sentence for path in FILES for _, sentence in long_sentences(texts_of(path))]
    assert [start for start in LONG if not any(sentence.startswith(start) for sentence in text)] == []


def test_no_name_is_vague() -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{name}" for path in MODULES for name in vague_names(path.read_text(encoding="utf-8"))
    ]
    assert not vague, "\n".join(vague)


WORDS = " ".join(["word"] * 30)


@pytest.mark.parametrize(
    "source",
    [
        f'"""{WORDS} more."""',
        f'def f() -> None:\n    """Does it.\n\n    Args:\n        x: {WORDS} more.\n    """',
        f"x = 1\n# {WORDS}\n# more.",
        f'raise ValueError(f"{WORDS} {{x}}.")',
    ],
)
def test_a_long_sentence_of_a_module_is_seen(source: str) -> None:
    assert len(long_sentences(module_texts(source))) == 1
    assert not long_sentences(module_texts(source.replace("word word", "word")))


@pytest.mark.parametrize(
    ("text", "is_long"),
    [
        (f"{WORDS} more.", True),
        (f"- {WORDS} more\n- {WORDS}", True),
        (f"{WORDS}. {WORDS}? {WORDS} ", False),
        (f"{WORDS}\n\n{WORDS}", False),
        (f"- {WORDS}\n- {WORDS}\n1. {WORDS}", False),
        (f"```\n{WORDS} {WORDS}\n```\n| {WORDS} {WORDS} |\n# {WORDS} {WORDS}", False),
        (f">>> {WORDS} {WORDS}\n{WORDS} {WORDS}\n\n{WORDS}", False),
        (f"Args:\n    x: {WORDS}\n    y: {WORDS}", False),
        ("A list of `names`, " + "`one`, " * 40 + "and ``another`` [of them](https://example.org/a b).", False),
        (f"{WORDS} e.g. more", True),
    ],
)
def test_what_a_sentence_is(text: str, is_long: bool) -> None:
    assert bool(long_sentences(iter([(1, text)]))) is is_long


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "def each(): ...",
        "def f(many): ...",
        "f(each=1)",
        "[each for each in x]",
        "lambda told: told",
        "x.noted",
        "class A:\n    found: int",
        "if found := f(): ...",
        "import a as found",
    ],
)
def test_a_vague_name_is_seen(source: str) -> None:
    assert vague_names(source)
    assert not any(vague_names(re.sub("|".join(VAGUE), "entry", source)))
