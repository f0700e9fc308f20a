"""Stop strings in a stream of text: nothing of one is ever shown, however it is cut into pieces."""

from __future__ import annotations


class StopMatcher:
    """Lets text through up to the stop string that is complete first; of two that end together, the longer one.

    What may still become a stop string is held back and released whole once it cannot. What is shown depends on the
    text alone, not on its cuts. Linear in the text: each character advances one Knuth-Morris-Pratt matcher per stop
    string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.is_stopped = False
        """A stop string was found; nothing more is shown."""
        self._stops = stops
        self._borders = [_border_lengths(stop) for stop in stops]
        self._matched = [0] * len(stops)  # for each stop string, how much of its beginning ends the text so far
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """What may be shown after this much more text. Unless it may stop, what is complete with it does not count."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        for end in range(len(self._held), len(text)):
            longest_found = self._advance(text[end])
            if longest_found and may_stop:
                self.is_stopped = True
                self._held = ""
                return text[: end + 1 - longest_found]
        shown_length = len(text) - max(self._matched)
        self._held = text[shown_length:]
        return text[:shown_length]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Move every matcher over one character; the length of the longest stop string that it completes, or 0."""
        longest_found = 0
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._borders[index][matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                longest_found = max(longest_found, matched)
                matched = self._borders[index][-1]
            self._matched[index] = matched
        return longest_found


def _border_lengths(text: str) -> list[int]:
    """For each beginning of text, the length of its longest proper beginning that also ends it: "abab" -> 0 0 1 2."""
    borders = [0] * len(text)
    border = 0
    for index in range(1, len(text)):
        while border and text[border] != text[index]:
            border = borders[border - 1]
        if text[border] == text[index]:
            border += 1
        borders[index] = border
    return borders
