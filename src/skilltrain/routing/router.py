"""A router: a pool and a list of rankers, opened once, that answers requests in plain words with skills."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from skilltrain.config import Config, load_recipe, validate
from skilltrain.data.pool.read import read_pool
from skilltrain.data.screening import Flag, screen
from skilltrain.errors import SkilltrainError
from skilltrain.files import inside
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems, keeps_of
from skilltrain.retrieval.rankers import Ranker, open_ranker

ROUTER_FILE = "router.yaml"


class RouterConfig(Config):
    """What the file of a router's folder holds; paths are relative to the folder."""

    pool: Path = Field(description="folder of the pool")
    rankers: list[dict[str, Any]] = Field(min_length=1, description="what ranks, as in a recipe")


@dataclass(frozen=True)
class RoutedSkill:
    """One answer: how far up, how sure, which skill, and what the safety screening found in it."""

    rank: int
    score: float
    skill: Skill
    flags: tuple[Flag, ...]


class Router:
    """Answers requests over one pool; its models stay open."""

    def __init__(self, skills: Sequence[Skill], system: SystemConfig) -> None:
        """Open the rankers of `system`. Raises SkilltrainError for an empty pool and for a model that is missing."""
        if not skills:
            raise SkilltrainError("the pool is empty")
        check_systems([system])
        opened: dict[str, Ranker] = {}
        self._rankers = [open_ranker(ranker, skills, opened) for ranker in system.rankers]
        self._system = system
        self._by_id = {skill.skill_id: skill for skill in skills}

    @classmethod
    def load(cls, folder: Path | str) -> "Router":
        """The router that `skilltrain fit` wrote into `folder`. Raises SkilltrainError where there is none."""
        folder = Path(folder)
        file = folder / ROUTER_FILE
        config = validate(RouterConfig, load_recipe(file), file)
        rankers = [_placed(ranker, folder, file) for ranker in config.rankers]
        system = validate(SystemConfig, {"name": "router", "rankers": rankers}, file)
        return cls(read_pool(cls.pool_of(folder)), system)

    @staticmethod
    def pool_of(folder: Path) -> Path:
        """The pool of the router in `folder`."""
        file = folder / ROUTER_FILE
        return inside(folder, str(validate(RouterConfig, load_recipe(file), file).pool), file)

    def route(self, request: str, top: int = 5) -> list[RoutedSkill]:
        """The `top` skills for `request`, best first. Raises SkilltrainError for an empty request."""
        if not request.strip():
            raise SkilltrainError("the request is empty")
        query = Query("request", request, kind="", origin="", split="")
        found: Rankings | None = None
        for ranker, keep in zip(self._rankers, keeps_of(self._system, top), strict=True):
            found = ranker.rank([query], found, keep)
        ranking = found[query.query_id][:top] if found else []
        answers = [(score, self._by_id[skill_id]) for skill_id, score in ranking]
        # Screened here, because the flags beside a stranger's pool may be anything.
        return [RoutedSkill(rank, score, skill, tuple(screen(skill))) for rank, (score, skill) in enumerate(answers, 1)]


def _placed(value: Any, folder: Path, file: Path) -> Any:
    """Settings of rankers with paths in the router's own folder made whole; Hub ids and packages stay as they are."""
    if isinstance(value, list):
        return [_placed(item, folder, file) for item in value]
    if not isinstance(value, dict):
        return value
    placed = {key: _placed(item, folder, file) for key, item in value.items()}
    for key in ("source", "cache", "rankings", "weights"):
        name = placed.get(key)
        if isinstance(name, str) and (key == "cache" or (folder / name).exists()):
            placed[key] = str(inside(folder, name, file))
    return placed
