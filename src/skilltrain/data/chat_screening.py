"""Stage `screen`: a chat model reads the skills of a pool, and its findings become flags.

The rules of the stage `pool` look at words. A chat model can also understand who asks for a step,
who receives data, and whether a user would object. Its prompt is `screen` in prompts.yaml.

Notes:
- A skill without a usable answer is called unread. It has a row in DROPPED, and is never counted
  as harmless.
- Files beside a SKILL.md are not in a pool, so a chat model does not see them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from skilltrain.config import InputPath, Seed
from skilltrain.data.llm_stage import PROMPTS, ask, questions_of, render_prompt
from skilltrain.data.screening import MAX_SPAN, read_flags, write_flags
from skilltrain.data.screening.findings import CHAT_MODEL, add_findings, safe_reason
from skilltrain.data.screening.rules import Flag
from skilltrain.errors import SkilltrainError
from skilltrain.files import LOCAL_FILE, read_local, write_json
from skilltrain.llm import LLMConfig, Questions, estimate_cost, read_object
from skilltrain.llm.untrusted import MAX_LINE_CHARS, untrusted_skill
from skilltrain.records import Skill, counted
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, SKILLS, read_skills, table_path, write_table

DESCRIPTION_CHARS = 4000  # the rest of a longer description is not read; few are longer
_OVERLAP_CHARS = 500  # shared by neighbouring pieces: a sentence cut in one is whole in the other
_ANSWER_TOKENS = 90  # expected length of an answer


class ReaderConfig(LLMConfig):
    """Settings of a chat model that reads skills. By default, it gives its likeliest answer."""

    temperature: float | None = Field(default=0.0, ge=0, le=2, description="null: the server's own")


class Screen(Stage):
    """Let a chat model read the skills of a pool, and add its findings to the flags."""

    example = "pool=runs/pool llm.model=gpt-4o-mini llm.budget.max_dollars=5 out=runs/screened"
    result = (
        "the model read {num_read} of {num_skills} skills in full and finds {num_found} harmful, "
        "{num_new} of them without a flag before; unread: {dropped}; cut: {num_cut}"
    )
    next_command = "synthesize pool={out} out={near}/queries"

    stage: Literal["screen"] = "screen"
    pool: InputPath = Field(description="pool to read: a folder of the stage pool")
    llm: ReaderConfig = Field(description="the chat model that reads the skills")
    piece_chars: int = Field(
        default=20_000,
        ge=1000,
        description="a longer body is read in pieces of this many characters",
    )
    seed: Seed = Field(default=0, description="decides the model's seeds")
    out: Path = Field(description="folder for the pool with all flags; dropped has unread skills")

    def run(self, out: Path) -> Summary:
        """Write the pool with the flags of the rules and of the model.

        Returns:
            Counts of skills that were read, found harmful, unread and cut, and the cost.

        Raises:
            SkilltrainError: The rules have not screened the pool, or no answer is usable.
        """
        flags = _rule_flags(self.pool)
        skills = read_skills(self.pool)
        outcome = ask(_questions(self, skills))
        if skills and not outcome.values:
            problem = f"read none of {len(skills)} skills: {outcome.dropped[0].reason}"
            raise SkilltrainError("nothing-generated", problem, where=self.pool)

        findings = _findings(outcome.values)
        write_table(skills, SKILLS, out)
        write_table(outcome.dropped, DROPPED, out)
        unread_ids = {row.skill_id for row in outcome.dropped}
        # A skill that this model has read in full loses the finding of an earlier model. Its id
        # stays in `flags`, so `num_new` does not count a skill that the earlier model flagged.
        for skill_id in flags.keys() - unread_ids:
            flags[skill_id] = [flag for flag in flags[skill_id] if flag.rule != CHAT_MODEL]
        write_flags(add_findings(flags, findings), out)
        # Copy the file that names the folders of the skills on this machine. Routers watch them.
        write_json(out / LOCAL_FILE, read_local(table_path(self.pool, SKILLS).parent))

        return {
            "num_skills": len(skills),
            "num_read": len(skills) - len(unread_ids),
            "num_found": len(findings),
            "num_new": len(findings.keys() - flags.keys()),
            "num_cut": _num_cut(skills),
            "dropped": counted(row.filter for row in outcome.dropped),
            **outcome.used,
        }

    def dry_run(self) -> Summary:
        """Count the skills, and estimate the cost without asking the chat model."""
        _rule_flags(self.pool)  # raises an error that `run` would raise too
        skills = read_skills(self.pool)
        cost = estimate_cost(_questions(self, skills))
        return {"num_skills": len(skills), "num_cut": _num_cut(skills), **cost}


def _rule_flags(pool: Path) -> dict[str, list[Flag]]:
    """Return the flags of a pool by skill id.

    Other stages take a FLAGS table as a sign that the rules have screened the pool. So the stage
    `screen`, which writes this table, refuses a pool that the rules have not screened.

    Raises:
        SkilltrainError: The pool has no FLAGS table.
    """
    flags = read_flags(pool)
    if flags is None:
        fix = "skilltrain pool makes a pool with flags"
        raise SkilltrainError("missing-table", "no flags table here", where=pool, fix=fix)
    return flags


def _num_cut(skills: Sequence[Skill]) -> int:
    """Count the skills whose name or description is longer than what the model is shown."""
    return sum(
        len(skill.name) > MAX_LINE_CHARS or len(skill.description) > DESCRIPTION_CHARS
        for skill in skills
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """A skill, or a part of a long skill, that the model reads.

    Attributes:
        skill: The skill.
        start: Position in the body at which the part begins.
        number: Number of the part, from 1.
        total: Number of parts of the skill.
    """

    skill: Skill
    start: int
    number: int
    total: int
    # Empty, because the question is about a skill alone. Each item of `ask` needs this attribute.
    query_id: str = ""

    @property
    def skill_id(self) -> str:
        return self.skill.skill_id


def pieces_of(skill: Skill, piece_chars: int) -> Iterator[Piece]:
    """Cut a long skill into pieces. Neighbours share `_OVERLAP_CHARS` characters.

    Args:
        skill: The skill.
        piece_chars: Largest number of characters of the body in a piece.
    """
    step = piece_chars - _OVERLAP_CHARS
    # A piece that began in the last `_OVERLAP_CHARS` characters would have nothing new.
    starts = range(0, max(1, len(skill.body) - _OVERLAP_CHARS), step)
    for number, start in enumerate(starts, 1):
        yield Piece(skill, start, number, len(starts))


class Reading(BaseModel, frozen=True):
    """Answer of the model about a piece."""

    reason: str = Field(min_length=1)
    quote: str | None = None
    verdict: Literal["harmful", "harmless"]

    def flag(self, skill: Skill) -> Flag:
        """Return the flag for a harmful skill.

        If the skill does not contain the quote, the flag has an empty span at the start of the
        body.

        Args:
            skill: The skill that the model has read.
        """
        field, start, end = find_quote(self.quote or "", skill) or ("body", 0, 0)
        span = getattr(skill, field)[start:end]
        return Flag(CHAT_MODEL, field, start, end, span, safe_reason(self.reason))


def _findings(answers: Sequence[tuple[Piece, Reading]]) -> dict[str, Flag]:
    """Return the findings of the model by skill id.

    Args:
        answers: Each piece with the answer of the model. A long skill has several pieces. Its
            finding comes from the first piece that is harmful.
    """
    findings: dict[str, Flag] = {}
    for piece, reading in answers:
        if reading.verdict == "harmful":
            findings.setdefault(piece.skill_id, reading.flag(piece.skill))
    return findings


def find_quote(quote: str, skill: Skill) -> tuple[str, int, int] | None:
    """Return the field, the start and the end of a quote in a skill; None if it is not there.

    Models change white space when they quote, so it does not count. For example, the quote `run
    it` is found where a line ends after `run`.

    Args:
        quote: Text that the model has copied from the skill.
        skill: The skill.
    """
    # `\s+` matches any white space between two words.
    pattern = r"\s+".join(map(re.escape, quote.split()))
    if not pattern:
        return None  # an empty pattern would match everywhere
    for field in ("body", "description", "name"):
        match = re.search(pattern, getattr(skill, field))
        if match is not None:
            return field, match.start(), min(match.end(), match.start() + MAX_SPAN)
    return None


def reading_prompt(piece_chars: int, piece: Piece) -> tuple[str, str]:
    """Return the system and the user message about a piece.

    Args:
        piece_chars: Largest number of characters of the body in a piece.
        piece: The piece.
    """
    skill = replace(piece.skill, body=piece.skill.body[piece.start :])
    # `untrusted_skill` cuts the body after `piece_chars` characters, which is the end of the piece.
    # It also disarms characters that could steer the model.
    text = untrusted_skill(skill, DESCRIPTION_CHARS, piece_chars)
    return render_prompt(PROMPTS["screen"], text, part=piece.number, parts=piece.total)


def _questions(config: Screen, skills: Sequence[Skill]) -> Questions[Piece, Reading]:
    """Return the questions to the chat model, one for each piece of a skill."""
    pieces: list[Piece] = []
    for skill in skills:
        pieces += pieces_of(skill, config.piece_chars)
    return questions_of(
        config.llm,
        pieces,
        lambda piece: reading_prompt(config.piece_chars, piece),
        lambda piece, answer: read_object(answer, Reading),
        config.seed,
        _ANSWER_TOKENS,
        "reading skills",
    )
