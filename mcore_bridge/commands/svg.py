"""Writes SVG pictures of rectangles, lines and words, on white, or also on black for browsers in dark mode."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

_DARK = "@media (prefers-color-scheme: dark) { #paper { fill: #15181c } text { fill: #d5d9de } }"


class Picture:
    """A picture that is drawn from back to front; lengths are pixels.

    With ``dark``, paper and words change their colours in a dark browser; then no words may be on a bright shape.
    Further attributes of SVG are keywords: ``text_anchor="end"`` is ``text-anchor``. Numbers have two decimals at most.

    >>> picture = Picture(200, 100)
    >>> picture.rect(10, 10, 80, 20, title="a bar", fill="#2a6fb0")
    >>> picture.text(100, 25, "60 % & more")
    >>> str(picture).endswith('<text x="100" y="25">60 % &amp; more</text>\\n</svg>\\n')
    True
    """

    def __init__(self, width: float, height: float, *, dark: bool = False, **attributes: str | float) -> None:
        self._root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"})
        _set(self._root, width=width, height=height, viewBox=f"0 0 {_written(width)} {_written(height)}")
        _set(self._root, font_family="Helvetica, Arial, sans-serif", font_size=11, fill="#333")
        _set(self._root, **attributes)
        if dark:
            ElementTree.SubElement(self._root, "style").text = _DARK
            self.rect(0, 0, width, height, fill="#fff", id="paper", rx=6)
        else:
            self.rect(0, 0, width, height, fill="#fff")

    def text(self, x: float, y: float, words: str, **attributes: str | float) -> None:
        """Add words that begin at ``x`` on the line ``y``; ``text_anchor`` moves them."""
        self._add("text", x=x, y=y, **attributes).text = words

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: str | float) -> None:
        """Add a line between two points."""
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)

    def polyline(self, points: Iterable[tuple[float, float]], **attributes: str | float) -> None:
        """Add a line through many points."""
        places = " ".join(f"{_written(x)},{_written(y)}" for x, y in points)
        self._add("polyline", points=places, fill="none", **attributes)

    def rect(
        self, x: float, y: float, width: float, height: float, *, title: str = "", **attributes: str | float
    ) -> None:
        """Add a rectangle from its upper left corner; browsers show ``title`` when a mouse is over it."""
        shape = self._add("rect", x=x, y=y, width=width, height=height, **attributes)
        if title:
            ElementTree.SubElement(shape, "title").text = title

    def __str__(self) -> str:
        """The text of the file."""
        ElementTree.indent(self._root, "")
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, kind: str, **attributes: str | float) -> ElementTree.Element:
        element = ElementTree.SubElement(self._root, kind)
        _set(element, **attributes)
        return element


def _set(element: ElementTree.Element, **attributes: str | float) -> None:
    for name, value in attributes.items():
        element.set(name.replace("_", "-"), _written(value))


def _written(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
