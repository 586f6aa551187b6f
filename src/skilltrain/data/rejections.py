"""Stage `rejections`: requests for groups of skills, with what a chat model turns down and why (R3).

R3's abstracts say that a language model's rejections, which pipelines throw away, tell which skills must not be
retrieved together. How its groups are drawn and its prompts are not public; kinds, directions and words here are ours.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool
from pydantic import BaseModel, Field

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.asking import (
    TOKENS_PER_WORD,
    Line,
    ask,
    language_named,
    prompt,
    questions_of,
    unflagged_skills,
)
from skilltrain.data.draws import draw, split_groups, stable_number
from skilltrain.data.query_texts import fit_query
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import agreement
from skilltrain.llm import AnswerError, LLMConfig, Questions, estimate_cost, read_object
from skilltrain.llm.ask import ValueT
from skilltrain.llm.untrusted import untrusted_line, untrusted_skill
from skilltrain.records import Dropped, Judgement, Query, Reason, Skill, Verdict, counted
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.tables import DROPPED, JUDGEMENTS, write_queries, write_table
from skilltrain.texts import language_of, name_key

Kind = Literal["neighbours", "category", "across", "languages"]
Language = Literal["en", "zh"]
_TOKENS_PER_VERDICT = 40  # of an answer, a reason and its 20 words among them
_BODY_CHARS = 1000  # shown of each skill
_NEAR = 3  # neighbours are drawn from so many times as many as are wanted


class RejectionsConfig(Config):
    """Write requests for groups of skills, and keep what is rejected for them."""

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
        default=1000, ge=1, description="groups asked for, by turns of all directions and kinds"
    )
    group_size: int = Field(
        default=7, ge=2, le=20, description="skills in a group, the anchor among them"
    )
    kinds: tuple[Kind, ...] = Field(
        default=("neighbours", "category", "across", "languages"),
        min_length=1,
        description="neighbours of the anchor; its category; other categories; half of them of another language",
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


@dataclass(frozen=True, slots=True)
class Group:
    """Skills that are judged for one request: a given one, or one that the model writes in `lang` for the first."""

    query_id: str
    lang: str
    skills: tuple[Skill, ...]
    request: str = ""

    @property
    def skill_id(self) -> str:
        """The first one's."""
        return self.skills[0].skill_id


class Judged(BaseModel, frozen=True):
    """What an answer says of one skill, by its number from 1."""

    skill: int
    verdict: Verdict
    reason: Reason | None = None
    why: Line | None = None


class Judgements(BaseModel, frozen=True):
    """The answer where the request is given."""

    verdicts: tuple[Judged, ...] = ()


class JudgedRequest(Judgements, frozen=True):
    """The answer where it is not: a request with verdicts, or one that needs the first skill alone, with a refusal."""

    request: Line
    refusal: Reason | None = None
    why: Line | None = None


def run_rejections(config: RejectionsConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS and DROPPED; every group asked for is in one of the first and last.

    A refusal of a whole group is one, too: a request that needs the anchor alone, for which all others are rejected.
    Raises SkilltrainError where no group could be used.
    """
    groups, dropped = _groups(config)
    asked = ask(
        _questions(config, config.llm, groups, partial(read_request, set(), 2 * config.num_words))
    )
    dropped += asked.dropped
    if not asked.values:
        raise SkilltrainError(
            f"made no request for {len(groups)} groups; the first reason: {dropped[-1].reason}"
        )
    judge = f"llm:{config.llm.model}"
    members = {
        group.query_id: [skill.skill_id for skill in group.skills] for group, _ in asked.values
    }
    split = split_groups(members, config.dev_share, config.seed)
    queries = [
        Query(
            group.query_id,
            found.request,
            "single" if found.refusal else "multi",
            judge,
            split[group.query_id],
        )
        for group, found in asked.values
    ]
    judged = [
        one for group, found in asked.values for one in judgements_of(group, found.verdicts, judge)
    ]
    second = _judged_twice(config, asked.values, judged, out)
    write_queries(queries, judged, dropped, out)
    return {
        "num_groups": len(groups),
        "num_queries": len(queries),
        "num_refusals": sum(query.kind == "single" for query in queries),
        "num_dev": sum(query.split == "dev" for query in queries),
        "by_direction": counted(
            f"{group.lang}2{group.skills[0].lang}" for group, _ in asked.values
        ),
        "by_verdict": counted(one.verdict for one in judged),
        "by_reason": counted(one.reason for one in judged if one.reason),
        "dropped": counted(row.filter for row in dropped),
        **second,
        **asked.used,
    }


def plan_rejections(config: RejectionsConfig) -> dict[str, Any]:
    """What a run would ask for and about what it would cost, found without asking anybody (`--dry-run`)."""
    groups, dropped = _groups(config)
    plan = {"num_groups": len(groups), "dropped": counted(row.filter for row in dropped)}
    plan |= estimate_cost(_questions(config, config.llm, groups, read_given))
    if config.second_judge is not None:
        made_up = [
            replace(group, request="word " * config.num_words)
            for group in groups[: config.num_judged_twice]
        ]
        plan["second_judge"] = estimate_cost(
            _questions(config, config.second_judge, made_up, read_given)
        )
    return plan


def _questions(
    config: RejectionsConfig,
    llm: LLMConfig,
    groups: Sequence[Group],
    read: Callable[[Group, str], ValueT],
) -> Questions[Group, ValueT]:
    """What a judge is asked; where the request is given, its answer is shorter."""
    tokens = _TOKENS_PER_VERDICT * config.group_size
    tokens += 0 if groups[0].request else round(TOKENS_PER_WORD * config.num_words)
    told = partial(group_prompt, "group", config.num_words)
    return questions_of(llm, groups, told, read, config.seed, tokens, "judging groups")


def group_prompt(name: str, words: int, group: Group) -> tuple[str, str]:
    """What a judge is told by the prompt of a `name`; a request that it writes has about so many `words`."""
    parts = [
        f"Capability {n}\n{untrusted_skill(one, 300, _BODY_CHARS)}"
        for n, one in enumerate(group.skills, 1)
    ]
    if group.request:
        parts.insert(0, f"Request: {untrusted_line(group.request, 4000)}")
    return prompt(name, "\n\n".join(parts), given=bool(group.request), lang=group.lang, words=words)


def read_request(seen: set[str], max_words: int, group: Group, answer: str) -> JudgedRequest:
    """The request and one verdict for each skill, a refusal written out. Raises AnswerError or ValueError."""
    found, skills, lang = read_object(answer, JudgedRequest), group.skills, group.lang
    if found.refusal is not None:
        others = range(2, len(skills) + 1)
        turned = (
            Judged(skill=n, verdict=Verdict.REJECTED, reason=found.refusal, why=found.why)
            for n in others
        )
        found = found.model_copy(
            update={"verdicts": (Judged(skill=1, verdict=Verdict.REQUIRED), *turned)}
        )
    _check_verdicts(found.verdicts, skills)
    num_required = sum(one.verdict is Verdict.REQUIRED for one in found.verdicts)
    if num_required < 1 + (found.refusal is None):
        raise ValueError(
            f"{num_required} capabilities are required, two or more are wanted, or a refusal"
        )
    if language_of(found.request) not in (lang, None):
        raise AnswerError(
            "language", f"the request is not in {language_named(lang, 'the capabilities')}"
        )
    return found.model_copy(update={"request": fit_query(found.request, seen, max_words, skills)})


def read_given(group: Group, answer: str) -> Judgements:
    """One verdict for each skill. Raises ValueError where they are not there."""
    found = read_object(answer, Judgements)
    _check_verdicts(found.verdicts, group.skills)
    return found


def _check_verdicts(verdicts: Sequence[Judged], skills: Sequence[Skill]) -> None:
    """Raise ValueError where a skill has no verdict or two, or was rejected without a reason."""
    numbers = sorted(one.skill for one in verdicts)
    if numbers != list(range(1, len(skills) + 1)):
        raise ValueError(
            f"the capabilities judged are {numbers}, not 1 to {len(skills)}, each once"
        )
    if without := [
        one.skill for one in verdicts if one.verdict is Verdict.REJECTED and one.reason is None
    ]:
        raise ValueError(f"capability {without[0]} is rejected without a reason")


def judgements_of(group: Group, verdicts: Iterable[Judged], judge: str) -> list[Judgement]:
    """The judgements of a group; only a rejection has a reason."""
    found: list[Judgement] = []
    for one in verdicts:
        skill_id, reason = (
            group.skills[one.skill - 1].skill_id,
            one.reason if one.verdict is Verdict.REJECTED else None,
        )
        found.append(
            Judgement(group.query_id, skill_id, one.verdict, judge, reason, one.why, group.query_id)
        )
    return found


def _judged_twice(
    config: RejectionsConfig,
    made: Sequence[tuple[Group, JudgedRequest]],
    first: Sequence[Judgement],
    out: Path,
) -> dict[str, Any]:
    """Kappa of both judges over a sample of groups, of which the second sees the skills in another order."""
    if config.second_judge is None:
        return {}
    sample = sorted(made, key=lambda pair: stable_number(config.seed, "second", pair[0].query_id))
    groups: list[Group] = []
    for group, found in sample[: config.num_judged_twice]:
        turned = sorted(
            group.skills,
            key=lambda skill: stable_number(config.seed, group.query_id, skill.skill_id),
        )
        groups.append(replace(group, skills=tuple(turned), request=found.request))
    asked = ask(_questions(config, config.second_judge, groups, read_given))
    judge = f"llm:{config.second_judge.model}"
    judged = [judgements_of(group, found.verdicts, judge) for group, found in asked.values]
    verdict_of = {(one.query_id, one.skill_id): one.verdict for one in first}
    pairs = [
        [(verdict_of[one.query_id, one.skill_id], one.verdict) for one in of_group]
        for of_group in judged
    ]
    write_table([one for of_group in judged for one in of_group], JUDGEMENTS, out / "second")
    write_table(asked.dropped, DROPPED, out / "second")
    kappa = asdict(agreement(pairs))
    return {"kappa": kappa, "second_judge": {"num_groups": len(judged), **asked.used}}


def _groups(config: RejectionsConfig) -> tuple[list[Group], list[Dropped]]:
    """The groups to ask for, by turns of every direction and kind; and the skills and groups that are left out."""
    pool, dropped = unflagged_skills(config.pool)
    skills = [skill for skill in pool if skill.lang in config.languages]
    for skill in pool:
        if skill.lang not in config.languages:
            reason = (
                f"its language, {skill.lang or 'unknown'}, is none of {', '.join(config.languages)}"
            )
            dropped.append(Dropped("", skill.skill_id, "language", reason))
    if missing := sorted(set(config.languages) - {skill.lang for skill in skills}):
        fix = "name the pool's languages in languages"
        raise SkilltrainError(
            f"the pool holds no skill of language {missing[0]}", where=config.pool, fix=fix
        )
    order = sorted(
        range(len(skills)), key=lambda at: stable_number(config.seed, "anchor", skills[at].skill_id)
    )
    anchors = {
        lang: cycle([at for at in order if skills[at].lang == lang]) for lang in config.languages
    }
    decide = {
        "seed",
        "kinds",
        "languages",
        "group_size",
        "num_words",
    }  # of two runs, whether their groups are the same
    run = hashlib.sha256(
        f"{config.llm.model} {config.model_dump_json(include=decide)}".encode()
    ).hexdigest()
    turns = islice(
        cycle(product(product(config.languages, repeat=2), config.kinds)), config.num_groups
    )
    mates, groups = _Mates(config, skills), list[Group]()
    for number, ((asked, of), kind) in enumerate(turns):
        group_id, anchor = f"{kind}-{run[:6]}-{number:05}", next(anchors[of])
        if found := mates.of(anchor, kind, group_id):
            groups.append(Group(group_id, asked, tuple(skills[at] for at in (anchor, *found))))
        else:
            reason = f"no other skill can stand with it in a group of kind {kind}"
            dropped.append(Dropped(group_id, skills[anchor].skill_id, "group_of_one", reason))
    if not groups:
        raise SkilltrainError(
            "every group would hold one skill alone", where=config.pool, fix="give a larger pool"
        )
    return groups, dropped


class _Mates:
    """Draws the others of a group; the same whatever was drawn before."""

    def __init__(self, config: RejectionsConfig, skills: Sequence[Skill]) -> None:
        self.wanted, self.seed = config.group_size - 1, config.seed
        self.vectors = open_encoder(config.encoder).encode_skills(skills)
        self.names = np.array([name_key(skill.name) for skill in skills])
        self.langs = np.array([skill.lang for skill in skills])
        self.categories = np.array([skill.category or "" for skill in skills])

    def of(self, anchor: int, kind: Kind, group_id: str) -> list[int]:
        """Positions of at most `group_size` - 1 skills of other names; none where no skill fits."""
        other_name, same_lang = self.names != self.names[anchor], self.langs == self.langs[anchor]
        own, alike = other_name & same_lang, self.categories == self.categories[anchor]
        if kind == "category":
            return self._drawn(own & alike & (self.categories != ""), self.wanted, group_id)
        if kind == "across":
            return self._drawn(own & ~alike, self.wanted, group_id)
        foreign = (
            self._near(anchor, other_name & ~same_lang)
            if kind == "languages"
            else np.zeros_like(own)
        )
        far = self._drawn(foreign, (self.wanted + 1) // 2, f"{group_id}/far")
        near = self._drawn(self._near(anchor, own), self.wanted - len(far), group_id)
        return [*far, *near] if kind == "neighbours" or far else []

    def _near(self, anchor: int, allowed: Bool[np.ndarray, " skill"]) -> Bool[np.ndarray, " skill"]:
        likeness = np.where(allowed, self.vectors @ self.vectors[anchor], -np.inf)
        nearest = np.argsort(-likeness, kind="stable")[: _NEAR * self.wanted]
        return allowed & np.isin(np.arange(len(allowed)), nearest)

    def _drawn(self, allowed: Bool[np.ndarray, " skill"], count: int, key: str) -> list[int]:
        return draw(np.flatnonzero(allowed), count, f"{self.seed}/{key}").tolist()
