"""Filters of skills by their facts, for requests to a router (SkillFlow, section A.1)."""

from collections.abc import Collection, Iterable
from datetime import date
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from skilltrain.config import Config, suggestion
from skilltrain.records import Skill


def _as_tuple(value: Any) -> Any:
    """Return a single value as a tuple of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Values = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""A text, or a list of texts."""
_ONE_OF = ("category", "lang", "source", "license", "author")
_MAX_LISTED = 20  # largest number of values in a message


class Filters(Config):
    """Requirements of a request. A skill whose value is unknown does not meet its requirement."""

    category: Values = Field(default=(), description="one of these categories")
    lang: Values = Field(default=(), description="one of these languages")
    source: Values = Field(default=(), description="one of these sources")
    license: Values = Field(default=(), description="one of these licences")
    author: Values = Field(default=(), description="one of these authors")
    tags: Values = Field(default=(), description="at least one of these tags")
    min_stars: int | None = Field(default=None, ge=1, description="least number of stars")
    updated_since: date | None = Field(default=None, description="earliest day of the last change")
    exclude: Values = Field(default=(), description="ids of skills that are never answers")

    def excluded_ids(self, skills: Iterable[Skill]) -> set[str]:
        """Return the ids of the skills that do not pass."""
        return {skill.skill_id for skill in skills if not self.accepts(skill)}

    def empty_reason(self, skills: Collection[Skill]) -> str:
        """Return why no skill passes, or "" if some skill passes.

        For example: "no skill has license=MTI, did you mean 'MIT'? values of license: MIT, ISC".
        """
        if any(map(self.accepts, skills)):
            return ""
        # Find a filter whose values no skill has.
        for name in (*_ONE_OF, "tags"):
            allowed = getattr(self, name)
            values: set[str] = set()
            for skill in skills:
                values.update(_as_tuple(getattr(skill, name) or ()))
            if allowed and values.isdisjoint(allowed):
                listed = ", ".join(sorted(values)[:_MAX_LISTED]) or "none"
                # The advice joins both halves of the message, such as ", did you mean 'MIT'? ".
                advice = suggestion(allowed[0], [*values])
                return f"no skill has {name}={allowed[0]}{advice}values of {name}: {listed}"
        return "no skill passes all of them"

    def accepts(self, skill: Skill) -> bool:
        """Return whether a skill passes all filters.

        An empty filter accepts every skill. A skill whose value is unknown (None) is not accepted
        by a filter of this value.
        """
        # These filters name a field of the skill and its allowed values.
        for name in _ONE_OF:
            allowed = getattr(self, name)
            if allowed and getattr(skill, name) not in allowed:
                return False
        if self.tags and not set(self.tags).intersection(skill.tags or ()):
            return False
        if self.min_stars is not None and (skill.stars or 0) < self.min_stars:
            return False
        # Texts of ISO dates sort like the dates, even with a time behind the date.
        if self.updated_since and (skill.updated_at or "") < self.updated_since.isoformat():
            return False
        return skill.skill_id not in self.exclude
