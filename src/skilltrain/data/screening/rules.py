"""The rules of the safety screening, as rules.yaml states them.

A rule has `checks`, which are tried in all texts, and `program_checks`, which are tried in files
that are not for readers. Most program checks look for a pair of things a program does, such as
reading credentials near sending data. Each of the two alone is harmless.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ImportString

from skilltrain.config import Config
from skilltrain.data.screening.fragments import expand
from skilltrain.data.screening.normalize import NormalizedText, Spans

Kind = Literal["name", "description", "body", "program"]


def _join_alternatives(regex: str | Sequence[str]) -> str:
    """Return an expression that rules.yaml gives as one text or as a list of alternatives."""
    return regex if isinstance(regex, str) else "|".join(regex)


def _split_anchors(anchors: str) -> list[str]:
    """Return the anchors that rules.yaml gives as one text, separated by bars."""
    return expand(anchors).split("|")


Regex = Annotated[str, BeforeValidator(_join_alternatives), AfterValidator(expand)]


@dataclass(frozen=True, slots=True)
class Flag:
    """One finding of a rule in a skill.

    Attributes:
        rule: Name of the rule.
        field: name, description, body, or `./PATH` of a bundled file.
        start: Start of the finding in the field's text.
        end: End of the finding, at most 400 characters after its start.
        span: The text of the finding. Of a secret it has only the beginning.
        reason: Why the finding matters.
    """

    rule: str
    field: str
    start: int
    end: int
    span: str
    reason: str


class Check(Config, validate_default=False):
    """One way to detect a violation of a rule: a regular expression with conditions.

    Attributes:
        anchors: Literal texts in lower case. `regex` is tried only within `anchor_chars` of one of
            them. Without anchors it is tried everywhere.
        regex: The expression, for the normalised text.
        custom: Function that replaces `regex` and all conditions.
        in_original: Whether `custom` yields spans of the original text.
        needs: Expressions that must all match near a finding.
        scores: Points by expression, for those that match near a finding.
        min_score: Points that a finding needs.
        unless: Expression that must not match near a finding.
        skip_if: Whether to skip commands with a warning around them (`warned`), commands that a
            skill about security shows as examples (`sample`), orders that are only quoted
            (`quoted`), or nothing.
        skip_linked_source: Whether to skip downloads from sites and GitHub accounts that the skill
            links to elsewhere. They probably belong to the skill or to the program it is about.
        context_chars: What counts as near, in characters before and after a finding.
        anchor_chars: Characters searched before and after an anchor.
        fields: Kinds of texts that are checked.
    """

    anchors: Annotated[tuple[str, ...], BeforeValidator(_split_anchors)] = ()
    regex: Regex = ""
    custom: ImportString[Callable[[NormalizedText], Spans]] | None = None
    in_original: bool = False
    needs: tuple[Regex, ...] = ()
    scores: dict[Regex, int] = Field(default={})
    min_score: int = 0
    unless: Regex = ""
    skip_if: Literal["warned", "sample", "quoted"] | None = "warned"
    skip_linked_source: bool = False
    context_chars: int = 160
    anchor_chars: int = 400
    fields: tuple[Kind, ...] = ("name", "description", "body", "program")

    def find_spans(self, text: NormalizedText) -> Spans:
        """Yield the spans of all findings in the original text. They may overlap."""
        # A check with anchors skips a text that has none of them.
        anchors = [anchor for anchor in self.anchors if text.has_anchor(anchor)]
        if self.anchors and not anchors:
            return
        spans = self.custom(text) if self.custom else self._find_matches(text, anchors)
        for span in spans:
            # Spans in the normalised text are translated to the original text.
            yield span if self.in_original else text.original_span(*span)

    def _find_matches(self, text: NormalizedText, anchors: Sequence[str]) -> Spans:
        """Yield the spans of matches of `regex` that meet all conditions, without leading spaces.

        Args:
            text: The text to search.
            anchors: Those of `self.anchors` that occur in the text. Without any, the whole text is
                searched.
        """
        windows = [(0, len(text.normalized))]
        if anchors:
            # To save time, try `regex` only near the anchors.
            windows = _windows_around(anchors, text.normalized, self.anchor_chars)
        for window_start, window_end in windows:
            for match in self._pattern.finditer(text.normalized, window_start, window_end):
                start = match.end() - len(match[0].lstrip())  # without leading spaces
                if self._meets_conditions(text, start, match.end()):
                    yield start, match.end()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self.regex)

    def _meets_conditions(self, text: NormalizedText, start: int, end: int) -> bool:
        """Return whether a match of `regex` meets all other conditions of this check.

        Args:
            text: The text that was searched.
            start: Start of the match in `text.normalized`.
            end: End of the match in `text.normalized`.
        """
        # The conditions look at the match and `context_chars` characters on both sides.
        context_start = start - self.context_chars
        context_end = end + self.context_chars

        def is_near(regex: str) -> bool:
            return text.has_match_between(regex, context_start, context_end)

        # Every expression in `needs` must be near the match.
        if not all(is_near(regex) for regex in self.needs):
            return False

        # Add up the points of the expressions that are near, and require `min_score` points.
        score = sum(points for regex, points in self.scores.items() if is_near(regex))
        if score < self.min_score:
            return False

        # Skip a harmless match: near an exception, or a download from a site that the skill names.
        if self.unless and is_near(self.unless):
            return False
        if self.skip_linked_source and text.is_from_linked_source(start, end):
            return False

        # Skip text that is not a command of this skill. At most one of these conditions is set.
        if self.skip_if == "quoted":
            return not text.is_quoted(start)
        if self.skip_if == "sample":
            return not text.is_sample(start, end)
        if self.skip_if == "warned":
            return not text.has_warning(start, end)
        return True


class Rule(Config):
    """A named rule, and the reason that its flags show."""

    name: str
    reason: str
    checks: tuple[Check, ...] = ()
    program_checks: tuple[Check, ...] = ()

    def checks_for(self, kind: str) -> list[Check]:
        """Return the checks for a kind of text: name, description, body or program."""
        checks = [check for check in self.checks if kind in check.fields]
        if kind == "program":
            checks += self.program_checks
        return checks


def _windows_around(anchors: Sequence[str], text: str, num_chars: int) -> list[tuple[int, int]]:
    """Return the spans within `num_chars` of an anchor, in order and without overlap.

    Args:
        anchors: Literal texts to find.
        text: Text to search.
        num_chars: Characters of a window before and after the start of an anchor.

    Returns:
        Start and end of each window in the text.
    """
    starts = []
    for anchor in anchors:
        starts += [match.start() for match in re.finditer(re.escape(anchor), text)]

    windows = []
    for start in sorted(starts):
        window_start = max(0, start - num_chars)
        if windows and window_start <= windows[-1][1]:  # it overlaps with the last window
            # Join the two windows to one window.
            window_start, _ = windows.pop()
        windows.append((window_start, start + num_chars))
    return windows
