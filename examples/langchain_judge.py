"""Judge the skills of langchain-skill-router with the calibrated probabilities of a router.

    judge = RouterJudge(Router.load("runs/router"))
    middleware = SkillRouterMiddleware(judge=judge, ...)

The router must hold the skills of the agent, by the same names, and be calibrated (as `fit` does).
A yes-no question of the middleware gets one of three probabilities:

- `need_question` (key `need`): the probability that any skill fits
- a question about one skill: the probability of that skill
- any other question: ranked as one more skill, by its text
"""

import re
from collections.abc import Mapping
from functools import cache

from anyio.to_thread import run_sync
from langchain_skill_router import DEFAULTS, Answer, JudgeMisconfigured, Limits, Pick, YesNo

from skilltrain import Router, Skill

SKILL_NAME = re.compile(r'<skill name="([^"]+)">')  # in a question about a skill
QUESTION = "\0question"  # id and name of a question that is ranked as a skill; no skill has it
Questions = Mapping[str, Pick | YesNo]


class RouterJudge:
    """A judge that asks no chat model."""

    limits = Limits()
    timeout = None

    def __init__(self, router: Router) -> None:
        if not (router.index and router.index.record.calibration):
            raise JudgeMisconfigured("the router is not calibrated")
        self._router = router
        self._calibrator = router.index.record.calibration.calibrator

    async def ask(self, state: Mapping[str, object], questions: Questions) -> dict[str, Answer]:
        """Answer all questions about the request in `state`."""
        return await run_sync(self._answer_all, str(state["request"]), questions)

    def _answer_all(self, request: str, questions: Questions) -> dict[str, Answer]:
        by_name = self._probabilities(self._router, request)
        answers: dict[str, Answer] = {}
        for key, question in questions.items():
            if isinstance(question, Pick):
                answers[key] = Answer({name: by_name.get(name, 0.0) for name in question.options})
            elif key == "need" or question.instructions == DEFAULTS.need_question:
                fit_probability = self._calibrator.fit_probability(self._router.trace(request))
                answers[key] = Answer({"yes": fit_probability})
            elif match := SKILL_NAME.search(question.instructions):
                answers[key] = Answer({"yes": by_name.get(match[1], 0.0)})
            else:
                router = self._router_with(question.instructions)
                by_ranked = self._probabilities(router, request)
                answers[key] = Answer({"yes": by_ranked.get(QUESTION, 0.0)})
        return answers

    @cache  # noqa: B019 - a judge lives as long as its program
    def _router_with(self, question: str) -> Router:
        """Return a router that ranks a question as one more skill, by its text."""
        skill = Skill(QUESTION, QUESTION, question, "")
        return self._router.with_skills([*self._router.skills.values(), skill])

    def _probabilities(self, router: Router, request: str) -> dict[str, float]:
        """Return the probability of each ranked skill by name.

        If names repeat, the best-ranked skill counts.
        """
        trace = router.trace(request)
        names = [router.skills[skill_id].name for skill_id, _ in trace.ranking]
        values = self._calibrator.probabilities(trace).tolist()
        # Later items overwrite earlier ones, so the best-ranked comes last.
        return dict(zip(reversed(names), reversed(values), strict=True))
