"""Stop strings: nothing of one is shown, nothing else is lost, and the cuts of the stream do not matter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stops import StopMatcher


def shown_after(stops: tuple[str, ...], *pieces: str) -> list[str]:
    """What each piece shows, and last what the end of the text shows."""
    matcher = StopMatcher(stops)
    return [*(matcher.push(piece) for piece in pieces), matcher.flush()]


def truncate(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The truth in one line: cut at the stop string that ends first, of those at the longest."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert shown_after((), "ab", "", "c") == ["ab", "", "c", ""]


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("END",), ["one EN", "D two"], ["one ", "", ""]),
        (("END",), ["one EN", "ough"], ["one ", "ENough", ""]),
        (("END",), ["one E"], ["one ", "E"]),  # the text ends while it is undecided
        (("END",), ["E", "N", "D"], ["", "", "", ""]),
        (("aab",), ["aaa", "ab"], ["a", "a", ""]),  # falls back inside itself: a|a|aab
        (("\n\n", "."), ["a\n", "b.c"], ["a", "\nb", ""]),
        (("abcd", "bc"), ["xabcd"], ["xa", ""]),  # bc is complete before abcd
        (("bc", "abc"), ["xab", "c"], ["x", "", ""]),  # both end together: the longer one
        (("é",), ["caf", "é!"], ["caf", "", ""]),
    ],
)
def test_a_stop_string_is_held_back_until_it_is_decided(
    stops: tuple[str, ...], pieces: list[str], expected: list[str]
) -> None:
    assert shown_after(stops, *pieces) == expected


def test_nothing_is_shown_after_a_stop_string() -> None:
    matcher = StopMatcher(("x",))
    assert matcher.push("axb") == "a"
    assert matcher.is_stopped
    assert matcher.push("more") == "" and matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "early", "late", "expected"),
    [
        (("END",), "one END two", " END", ["one END two ", ""]),
        (("END",), "one EN", "D", ["one ", ""]),  # begun early, complete late
        (("aa",), "aa", "a", ["a", ""]),  # its second half is the first of another
        (("ab", "cab"), "cab", "cab", ["cab", ""]),
    ],
)
def test_a_stop_string_that_is_complete_too_early_is_text(
    stops: tuple[str, ...], early: str, late: str, expected: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(early, may_stop=False)
    assert not matcher.is_stopped
    assert [shown + matcher.push(late), matcher.flush()] == expected
    assert matcher.is_stopped


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_any_cut_shows_the_text_before_the_first_complete_stop_string(
    stops: tuple[str, ...], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    expected, is_stopped = truncate("".join(pieces), stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert expected.startswith(shown), "something was shown that the result does not have"
    assert matcher.is_stopped == is_stopped
    assert shown + matcher.flush() == expected


@given(pieces=st.lists(st.text("ab", max_size=3), max_size=8), cut=st.integers(0, 24))
def test_what_is_shown_depends_on_the_text_alone(pieces: list[str], cut: int) -> None:
    text = "".join(pieces)[:cut]
    whole, cut_up = StopMatcher(("abab", "bb")), StopMatcher(("abab", "bb"))
    assert whole.push(text) == "".join(cut_up.push(character) for character in text)
    assert whole.flush() == cut_up.flush()
