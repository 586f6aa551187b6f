"""Stage `distractors`: skills that make an Easy tier Hard (SkillRouter, section 3 and appendix B).

In the paper, GPT-4o-mini writes 780 skills that resemble gold skills and are functionally distinct.
This stage writes a table that is one more source for the stage `pool`: Hard = Easy + distractors.
Each LLM request asks for one distractor, so only a failed one is repeated. `prompt` replaces our
prompt by a file. Our prompt differs from the paper's in two ways:

- It also forbids the other gold skills of the same tasks: they often solve the "different problem
  of the same domain".
- It shows neither queries nor ids of tasks, so that the benchmark's words do not leak into the
  pool.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from skilltrain.config import InputPath, Seed
from skilltrain.data.contamination import open_benchmarks
from skilltrain.data.llm_stage import PROMPTS, Line, ask, load_prompt, questions_of
from skilltrain.data.near_duplicates import Trigrams, jaccard, word_trigrams
from skilltrain.data.pool.skill_file import split_header
from skilltrain.llm import AnswerError, LLMConfig, Questions, estimate_cost, read_object
from skilltrain.llm.prompt_files import check_prompt, render_messages
from skilltrain.llm.untrusted import fenced, untrusted_line, untrusted_skill, untrusted_text
from skilltrain.records import Skill, counted
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, SKILLS, write_table
from skilltrain.texts import clean_text, name_key, num_words

STRATEGIES: Final[dict[str, str]] = PROMPTS["distractor"]["strategies"]
ASKED_WORDS: Final = (400, 1200)  # length of a body in the prompt
ACCEPTED_WORDS: Final = (150, 2400)  # length of a body in an answer
# Highest similarity of a body to a gold body or another distractor, as in stage `filter`.
MAX_JACCARD: Final = 0.6
# Tokens of the longest answer, as a JSON string. English prose takes 1.3 tokens a word, code and
# other scripts take more.
NUM_TOKENS: Final = math.ceil(ASKED_WORDS[1] * 1.6) + 100
_MAX_SIBLINGS = 12  # siblings that the model sees
_DESCRIPTION_CHARS = 500  # characters of the gold skill's description that the model sees
_BODY_CHARS = 4000  # characters of the gold skill's body that the model sees


class Distractors(Stage):
    """Write skills that resemble a benchmark's gold skills and do something else."""

    example = "benchmark=benchmark llm.kind=openai llm.max_tokens=3000 out=runs/distractors"
    result = "{num_distractors} skills that look like {num_gold_skills}; left out: {num_dropped}"
    next_command = "pool sources='[POOL, {out}]' out={near}/hard_pool"

    stage: Literal["distractors"] = "distractors"
    benchmark: InputPath = Field(
        description="benchmark whose gold skills are resembled; queries of split train are ignored"
    )
    pool: InputPath | None = Field(
        default=None, description="SKILLS with the gold skills that the benchmark lacks"
    )
    llm: LLMConfig = Field(
        description="chat model that writes; needs a long llm.max_tokens, such as 3000"
    )
    prompt: InputPath | None = Field(
        default=None,
        description="YAML file with templates system and user, which must use body (or fenced) and "
        "strategy_name (or strategy); null: our prompt",
    )
    num_distractors: int = Field(
        default=3,
        ge=1,
        le=9,
        description="distractors for each gold skill; three strategies take turns",
    )
    seed: Seed = Field(default=0, description="decides the model's seeds")
    out: Path = Field(description="folder for skills and dropped")

    @model_validator(mode="after")
    def _enough_tokens(self) -> "Distractors":
        if self.llm.max_tokens < NUM_TOKENS:
            raise ValueError(
                f"llm.max_tokens is {self.llm.max_tokens}, too few for a body of "
                f"{ASKED_WORDS[1]} words; set llm.max_tokens={NUM_TOKENS} or more"
            )
        return self

    def run(self, out: Path) -> Summary:
        """Let the chat model write the distractors, as the tables SKILLS and DROPPED.

        A distractor is a skill that resembles a gold skill (a skill that a task needs), and does
        something else. Its id names its gold skill and strategy. A distractor without a usable
        answer is in DROPPED, with its last fault. Screening is left to the stage `pool`.
        """
        questions = _questions(self)
        outcome = ask(questions)
        write_table([skill for _, skill in outcome.values], SKILLS, out)
        write_table(outcome.dropped, DROPPED, out)
        return {
            **_counts(questions),
            "num_distractors": len(outcome.values),
            "num_dropped": len(outcome.dropped),
            # The column `filter` of a dropped row holds the kind of fault, such as "too_short".
            "dropped": counted(row.filter for row in outcome.dropped),
            **outcome.used,  # tokens and dollars
        }

    def dry_run(self) -> Summary:
        """Count the distractors and estimate the cost. Asks no chat model."""
        questions = _questions(self)
        return _counts(questions) | estimate_cost(questions)


class GoldSkill(NamedTuple):
    """A skill that queries of the benchmark need.

    Attributes:
        siblings: The other gold skills of these queries.
        task_ids: Ids of these queries.
    """

    skill: Skill
    siblings: list[Skill]
    task_ids: list[str]


class Distractor(NamedTuple):
    """A distractor to be written.

    Attributes:
        number: Number among the gold skill's distractors of the same strategy, from 1.
        total: Number of the gold skill's distractors of the same strategy.
        query_id: For `questions_of`, which needs it; empty, because no query is shown.
    """

    skill_id: str
    gold: GoldSkill
    strategy: str
    number: int
    total: int
    query_id: str = ""


def _counts(questions: Questions[Distractor, Skill]) -> dict[str, int]:
    """Count the gold skills, and the distractors that are asked for."""
    num_golds = len({item.gold.skill.skill_id for item in questions.items})
    return {"num_gold_skills": num_golds, "num_asked": len(questions.items)}


def _questions(config: Distractors) -> Questions[Distractor, Skill]:
    """Return the questions to the chat model, one for each distractor.

    The distractors of a gold skill follow each other. All strategies take turns.
    """
    texts = _prompt_texts(config)
    golds = gold_skills(config)
    # Names of the strategies for one gold skill. They repeat if more distractors are wanted.
    strategies = list(islice(cycle(STRATEGIES), config.num_distractors))
    totals = Counter(strategies)  # distractors of a gold skill, by strategy
    items = []
    for gold in golds:
        num_by_strategy = Counter()
        for strategy in strategies:
            # The number of this distractor among those of the same strategy, from 1.
            num_by_strategy[strategy] += 1
            number = num_by_strategy[strategy]
            skill_id = f"distractor/{gold.skill.skill_id}/{strategy}"
            if number > 1:
                skill_id += f"-{number}"
            items.append(Distractor(skill_id, gold, strategy, number, totals[strategy]))

    # Skills that a distractor must not copy.
    gold_trigrams = [(gold.skill, word_trigrams(gold.skill.body)) for gold in golds]
    distractor_trigrams = []  # of the distractors that are already accepted; `read` adds to them

    def read(item: Distractor, answer: str) -> Skill:
        """Read a distractor from an answer of the chat model, and check that the skill is new.

        Raises:
            AnswerError: The body is too short or too long, or the skill copies another skill.
            ValueError: The answer holds no skill.
        """
        skill = read_draft(item, answer, f"distractors:{config.llm.model}")
        trigrams = word_trigrams(skill.body)
        _check_words(skill)
        _check_copy(skill, trigrams, gold_trigrams, "near_copy")
        _check_copy(skill, trigrams, distractor_trigrams, "duplicate")
        distractor_trigrams.append((skill, trigrams))
        return skill

    return questions_of(
        config.llm,
        items,
        lambda item: render_messages(texts, _prompt_values(item)),
        read,
        config.seed,
        NUM_TOKENS,
        "writing distractors",
    )


def gold_skills(config: Distractors) -> list[GoldSkill]:
    """Return the skills that queries of the benchmark need, each with its siblings.

    Raises:
        SkilltrainError: A gold skill is neither in the benchmark's folder nor in the pool.
    """
    [benchmark] = open_benchmarks([config.benchmark], config.pool, need_golds=True)
    skills = {gold.skill_id: gold for gold in benchmark.golds}

    golds: dict[str, GoldSkill] = {}  # by skill id, in the order of the tasks
    for task in benchmark.tasks:
        needed_skills = [skills[skill_id] for skill_id in sorted(task.relevance.gold)]
        for skill in needed_skills:
            gold = golds.setdefault(skill.skill_id, GoldSkill(skill, [], []))
            gold.task_ids.append(task.query.query_id)
            # Collect the distinct siblings. Two gold skills are siblings if a query needs both.
            for other in needed_skills:
                if other != skill and other not in gold.siblings:
                    gold.siblings.append(other)
    return list(golds.values())


def _prompt_texts(config: Distractors) -> Mapping[str, Any]:
    """Return the prompt to render: ours, or the one in `config.prompt`.

    Raises:
        SkilltrainError: The file cannot be read, uses an unknown placeholder, or does not show the
            gold skill's body or the strategy.
    """
    if config.prompt is None:
        return PROMPTS["distractor"]
    texts = load_prompt(config.prompt)
    example_gold = GoldSkill(Skill("", "", "", "(body)"), [], [])
    example = Distractor(
        skill_id="", gold=example_gold, strategy=next(iter(STRATEGIES)), number=1, total=2
    )
    values = _prompt_values(example)
    # Give both placeholders the same text, so that either one satisfies the check.
    values |= dict.fromkeys(("strategy", "strategy_name"), "(strategy)")
    # Without a strategy, all distractors of a gold skill would have the same prompt.
    required = {"body or fenced": "(body)", "strategy or strategy_name": "(strategy)"}
    check_prompt(texts, values, required, config.prompt)
    return texts


def _prompt_values(item: Distractor) -> dict[str, Any]:
    """Return the value of each placeholder of the prompt.

    Texts of strangers are cut, and cannot end a turn of the chat. Our prompt shows them as
    `fenced`, between two marked lines.
    """
    gold = item.gold
    skill = gold.skill
    category = untrusted_line(skill.category or "none given")
    siblings = []
    # A skill that does the same as a sibling would be a right answer for the same task.
    for sibling in gold.siblings[:_MAX_SIBLINGS]:
        description = untrusted_line(sibling.description, 160)
        siblings.append(f"- {untrusted_line(sibling.name)}: {description}")
    sibling_lines = "\n".join(siblings) or "(none)"
    material = untrusted_skill(skill, _DESCRIPTION_CHARS, _BODY_CHARS)
    return {
        "task_ids": ", ".join(map(untrusted_line, gold.task_ids)),
        "name": untrusted_line(skill.name),
        "category": category,
        "description": untrusted_line(skill.description, _DESCRIPTION_CHARS),
        "body": untrusted_text(skill.body, _BODY_CHARS),
        "siblings": sibling_lines,
        "fenced": fenced(f"Category: {category}\n{material}\nNot these either:\n{sibling_lines}"),
        "strategy": STRATEGIES[item.strategy],
        "strategy_name": item.strategy,
        "number": item.number,
        "total": item.total,
        "low": ASKED_WORDS[0],
        "high": ASKED_WORDS[1],
        "lang": skill.lang,
    }


class _Draft(BaseModel):
    """Answer of the model. Other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    name: Annotated[Line, Field(min_length=1, max_length=100, pattern=r"\w")]
    description: Annotated[Line, Field(min_length=1, max_length=1500)]
    body: Annotated[
        str,
        AfterValidator(lambda text: split_header(clean_text(text))[1].strip()),
        Field(min_length=1),
    ]


def read_draft(item: Distractor, answer: str, source: str) -> Skill:
    """Read a distractor from the JSON object in an answer of the chat model.

    Args:
        item: The distractor that the model was asked for. The category and the language of its gold
            skill are used.
        answer: Text of the answer.
        source: Value of the column `source` of the skill, which names the model.

    Raises:
        ValueError: The answer holds no usable object.
    """
    draft = read_object(answer, _Draft)
    gold = item.gold.skill
    return Skill(
        item.skill_id, draft.name, draft.description, draft.body, gold.category, gold.lang, source
    )


def _check_words(skill: Skill) -> None:
    """Raise AnswerError if a body is too short or too long.

    The accepted range is wider than the range that the prompt asks for.
    """
    count = num_words(skill.body)
    low, high = ACCEPTED_WORDS
    if not low <= count <= high:
        kind = "too_short" if count < low else "too_long"
        raise AnswerError(kind, f"its body has {count} words, {low} to {high} are wanted", count)


def _check_copy(
    skill: Skill, trigrams: Trigrams, references: Sequence[tuple[Skill, Trigrams]], kind: str
) -> None:
    """Raise AnswerError if a skill has the name of another skill, or nearly its body.

    A copy of a gold skill would be a right answer that counts as wrong.

    Args:
        skill: The skill.
        trigrams: Trigrams of its body.
        references: Skills to compare with, each with its trigrams.
        kind: Kind of the error if the bodies are nearly equal.
    """
    for other, other_trigrams in references:
        other_id = other.skill_id
        # `name_key` ignores differences in writing, such as capitals.
        if name_key(skill.name) == name_key(other.name):
            raise AnswerError("same_name", f"it has the name of {other_id}", other_id=other_id)
        similarity = jaccard(trigrams, other_trigrams)
        if similarity > MAX_JACCARD:
            reason = f"its body is nearly {other_id}'s"
            raise AnswerError(kind, reason, round(similarity, 4), other_id)
