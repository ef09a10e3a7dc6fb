"""Patterns from files: a pattern that is run gives the result of ``re``, and ends in time."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.peft import peft_read
from mcore_bridge.weights.peft.peft_read import Comparisons, problem_of

ATOMS = [
    *(
        "a",
        "b",
        r"\.",
        ".",
        "[ab]",
        "[^a]",
        r"\w",
        r"\d",
        "(a|b)",
        "(?:a|ab)",
        "(?!a)",
        "(?=b)",
        r"(?<=a)",
        "^",
        "$",
        "",
    ),
    *(r"\b", "{", "{e}", "a{1}", "[[:alpha:]]", "[[a]", "(", "|", r"\1", r"(b)\1", "(?i:B)", "(?P<n>a)", r"\p", "1"),
]


@given(
    st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from(["", "*", "+", "?", "{2}", "{,1}", "*?"])), max_size=5),
    st.text("ab.1A{}:e", max_size=6),
)
def test_a_pattern_says_what_re_says(parts, name):
    pattern = "".join(atom + count for atom, count in parts)
    if not problem_of(pattern):
        assert Comparisons().fullmatch(pattern, name) == (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a{e<=1}", "braces without a count"),
        ("[[:alpha:]]", r"or \[:"),
        ("((a?){1000}){1000}", "repeats more than"),
        ("a" * 10_001, "more than 10000 characters"),
        ("a{99999999999}", "repeats more than|too large"),
        ("(" * 3000 + ")" * 3000, "recursion"),
        ("(", "no regular expression"),
        (r"\p{L}", "no regular expression"),
    ],
)
def test_other_patterns_are_not_run(pattern, said):
    assert re.search(said, problem_of(pattern))


def test_all_comparisons_of_a_file_share_a_time(monkeypatch):
    """Many names that are each slow, but allowed, take together no longer than one endless name."""
    comparisons = Comparisons(seconds=0.2)
    assert comparisons.fullmatch("a+", "aaa")
    clock = itertools.count(0, 0.05)
    monkeypatch.setattr(peft_read.time, "process_time", lambda: next(clock))
    with pytest.raises(CheckpointError, match=r"patterns must be compared .* '\(a\|a\)\+\$' .* 'aab'"):
        all(not comparisons.fullmatch("(a|a)+$", "aab") for _ in range(5))
