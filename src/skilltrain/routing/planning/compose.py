"""One skill for each step, and which step waits for which (SkillWeaver, section 4.3, equation 4).

A candidate's score is alpha x similarity + (1 - alpha) x its mean compatibility with the skills of earlier steps. The
similarity is the ranker's score, stretched from 0 to 1 over a step's candidates, so that any ranker will do.
Compatibility is the mean of three shares: categories in common (Jaccard), words in common, and how much of what a skill
takes the earlier one gives. What skills take and give is read from their texts by a list of kinds of data: rough, as in
the paper, and no better than these texts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import TopologicalSorter
from statistics import fmean

from pydantic import Field

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Ranking, Skill
from skilltrain.routing.planning.decompose import circle_in
from skilltrain.routing.planning.hints import Round
from skilltrain.texts import one_line, words_of

_KINDS = (
    "address|article|audio|calendar|chart|code|coordinate|csv|dashboard|data|database|dataset|diagram|document|email|"
    "event|excel|file|graph|html|image|invoice|issue|json|list|map|markdown|message|note|page|paper|pdf|photo|"
    "picture|plan|post|presentation|report|result|route|schedule|score|script|slide|spreadsheet|summary|table|text|"
    "ticket|transcript|translation|url|video|website"
)
_HAN_KINDS = "图表|图片|报告|文档|文件|数据|视频|音频|邮件|网页|代码|论文|列表|表格|摘要"
_KIND = re.compile(rf"\b({_KINDS})s?\b|({_HAN_KINDS})", re.I)
_GIVES = re.compile(
    r"\b(?:build|compil|compos|creat|draft|draw|download|export|extract|fetch|find|gather|generat|get|into|mak|output|"
    r"plot|produc|render|return|retriev|sav|scrap|to|transcrib|writ)\w*\b(?:\W+\w+){0,6}|[生创写绘制下导提保获]\w{1,12}",
    re.I,
)
_TAKES = re.compile(
    r"\b(?:analy[sz]|attach|clean|convert|edit|email|from|import|load|of|pars|plot|process|publish|read|send|shar|"
    r"summari[sz]|transform|translat|upload|using|visuali[sz])\w*\b(?:\W+(?!(?:in)?to\b|and\b)\w+){0,6}|[读分转总翻发上]\w{1,12}",
    re.I,
)
_BACK = re.compile(
    r"\b(?:it|its|them|this|these|those|the\s+(?:result|output|finding|file|data)s?|resulting|above|previous|then|after|"
    r"afterwards|followed|finally|lastly|next|before|once|based\s+on)\b|[它其该这]|结果|然后|接着|随后|之后|最后|根据|基于|再",
    re.I,
)
_APART = re.compile(
    r"\b(?:meanwhile|in\s+parallel|at\s+the\s+same\s+time|separately|independently|also)\b|同时|另外|并行", re.I
)

_FETCHES = re.compile(
    r"(?:find|search|get|fetch|download|read|look|list|check|pull|query|retriev|collect|gather|scrap|load|open|monitor|"
    r"recommend|track|watch|book|locat|discover|identif|extract|view|browse|research)|[查搜找读]|获取|下载|检索|推荐|抓取|收集|提取",
    re.I,
)


class ComposeConfig(Config):
    """How one skill is chosen for each step."""

    alpha: float = Field(default=0.5, ge=0, le=1, description="weight of similarity; 1: compatibility does not count")
    candidates: int = Field(default=10, ge=1, description="skills found for a step, of which one is chosen")
    min_score: float | None = Field(
        default=None, description="a skill of a lower score does not fit the step; null: any does that scores at all"
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a plan: the steps that it waits for (counted from 0), what was found, and the skill that was chosen.

    `skill_id` is None where nothing fits.
    """

    text: str
    after: tuple[int, ...]
    candidates: tuple[tuple[str, float], ...]
    skill_id: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a task, how they came about round by round, and notes for whoever reads it."""

    task: Query
    steps: tuple[Step, ...]
    rounds: tuple[Round, ...]
    made_by: str
    notes: tuple[str, ...] = ()

    @property
    def levels(self) -> list[list[int]]:
        """Steps (from 0) that can be done at once, level after level."""
        return levels_of([step.after for step in self.steps])


@dataclass(frozen=True, slots=True)
class _Traits:
    categories: frozenset[str]
    words: frozenset[str]
    gives: frozenset[str]
    takes: frozenset[str]


def compose(
    task: Query,
    rounds: Sequence[Round],
    found: Sequence[Ranking],
    skills: Mapping[str, Skill],
    config: ComposeConfig,
) -> tuple[Step, ...]:
    """A step for each text of the last round, with one of the skills that were `found` for it."""
    draft = rounds[-1].draft
    after = dependencies(task.text, draft.texts) if draft.after is None else draft.after
    levels_of(after)
    steps: list[Step] = []
    for place, (text, ranking) in enumerate(zip(draft.texts, found, strict=True)):
        fitting = [pair for pair in ranking if config.min_score is None or pair[1] >= config.min_score]
        if not any(score for _, score in fitting):  # BM25's answer to a text without a known word
            fitting = []
        if draft.chosen:
            fitting = [(draft.chosen[place], 1.0)]
        before = [skills[step.skill_id] for step in steps if step.skill_id]
        chosen = _best(fitting, before, skills, config.alpha)
        steps.append(Step(text, after[place], tuple(fitting), chosen))
    return tuple(steps)


def _best(ranking: Ranking, before: Sequence[Skill], skills: Mapping[str, Skill], alpha: float) -> str | None:
    """The skill with the highest score; of equal ones the first."""
    if not ranking:
        return None
    scores = [score for _, score in ranking]
    low, width = min(scores), max(scores) - min(scores)
    total: dict[str, float] = {}
    for skill_id, score in ranking:
        similarity = (score - low) / width if width else 1.0
        fit = fmean(compatibility(one, skills[skill_id]) for one in before) if before else 0.0
        total[skill_id] = alpha * similarity + (1 - alpha) * fit if before else similarity
    return max(total, key=total.__getitem__)


def compatibility(earlier: Skill, later: Skill) -> float:
    """How well one skill follows another, from 0 to 1: the mean of three shares (see above)."""
    one, other = _traits(earlier), _traits(later)
    categories = len(one.categories & other.categories) / max(1, len(one.categories | other.categories))
    words = len(one.words & other.words) / max(1, min(len(one.words), len(other.words)))
    handed = len(one.gives & other.takes) / max(1, len(other.takes))
    return (categories + words + handed) / 3


@lru_cache(maxsize=20_000)
def _traits(skill: Skill) -> _Traits:
    said = f"{skill.name}. {skill.description}"
    categories = frozenset(part.strip().lower() for part in (skill.category or "").split(",") if part.strip())
    words = frozenset(word for word in words_of(said) if len(word) > 3 or not word.isascii())
    return _Traits(categories, words, given_by(said), _kinds(" ".join(_TAKES.findall(said))))


def given_by(text: str) -> frozenset[str]:
    """The kinds of data that a text says something makes or brings: chart, report, csv …"""
    return _kinds(" ".join(_GIVES.findall(text)))


def _kinds(text: str) -> frozenset[str]:
    return frozenset((latin or other).lower() for latin, other in _KIND.findall(text))


def dependencies(task: str, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """For each step the earlier ones that it waits for, counted from 0.

    A step that brings something new (find, download, 查找) waits for nobody, unless it or what stands between it and
    the step before points back (it, the result, then, 然后). Any other works on what is there: it waits for all earlier
    steps that no other waits for yet. One that is said to go side by side with the step before (also, 同时) waits for
    what that one waits for. And whoever names the output of an earlier step waits for it.
    """
    task, after = one_line(task), list[tuple[int, ...]]()
    for place, text in enumerate(texts):
        waits: set[int] = set()
        between = _between(task, texts[place - 1], text) if place else ""
        if place and _APART.search(f"{between} {text}"):
            waits |= {*after[-1]}
        elif place and (_BACK.search(f"{between} {text}") or not _FETCHES.match(text)):
            waits |= {*range(place)} - {other for one in after for other in one}
        for kind in _kinds(text):
            makers = [earlier for earlier in range(place) if kind in given_by(texts[earlier])]
            waits |= {*makers[-1:]}
        after.append(tuple(sorted(waits)))
    return tuple(after)


def _between(task: str, one: str, other: str) -> str:
    """What the task says between two steps, "before" if it names the later one first; "" if it does not quote both."""
    end, start = task.find(one) + len(one), task.find(other)
    if one not in task or start < 0:
        return ""
    return task[end:start] if start >= end else "before"


def levels_of(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Steps (from 0) that can be done at once, level after level. Raises SkilltrainError for a circle."""
    if circle := circle_in(after):
        raise SkilltrainError(f"the steps of a plan wait for each other: {circle}", fix="break the circle")
    sorter = TopologicalSorter(dict(enumerate(after)))
    sorter.prepare()
    levels: list[list[int]] = []
    while sorter.is_active():
        levels.append(sorted(sorter.get_ready()))
        sorter.done(*levels[-1])
    return levels
