"""Judge the skills of langchain-skill-router with the calibrated probabilities of a router.

    judge = RouterJudge(Router.load("runs/router"))
    middleware = SkillRouterMiddleware(judge=judge, ...)

The router must hold the skills of the agent, by the same names, and be calibrated (as `fit` does).
A question whether a skill is needed gets the probability that any skill fits. A question about one
skill gets the probability of this skill. Any other question is ranked as a skill among the others.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

from anyio.to_thread import run_sync
from langchain_skill_router import DEFAULTS, Answer, JudgeMisconfigured, Limits, Pick, YesNo

from skilltrain import Router, Skill

_SKILL_NAME = re.compile(r'<skill name="([^"]+)">')  # in the question whether a skill fits
_QUESTION_ID = "question"


class RouterJudge:
    """A judge that asks no chat model."""

    limits = Limits()
    timeout = None

    def __init__(self, router: Router, need_question: str = DEFAULTS.need_question) -> None:
        """Create the judge. `need_question` is that of the middleware's settings."""
        calibration = router.index.record.calibration if router.index else None
        if calibration is None:
            raise JudgeMisconfigured("the router is not calibrated")
        self._calibrator = calibration.calibrator
        self._router = router
        self._need_question = need_question
        self._with_question = lru_cache(self._add_question)

    async def ask(
        self, state: Mapping[str, object], questions: Mapping[str, Pick | YesNo]
    ) -> Mapping[str, Answer]:
        """Answer all questions about the request in `state`."""
        return await run_sync(self._answer_all, str(state["request"]), questions)

    def _answer_all(self, request: str, questions: Mapping[str, Pick | YesNo]) -> dict[str, Answer]:
        probabilities = self._probabilities(self._router, request)
        answers = {}
        for key, question in questions.items():
            if isinstance(question, Pick):
                by_option = {name: probabilities.get(name, 0.0) for name in question.options}
                answers[key] = Answer(by_option)
            else:
                answers[key] = Answer({"yes": self._yes(request, question, probabilities)})
        return answers

    def _yes(self, request: str, question: YesNo, probabilities: Mapping[str, float]) -> float:
        """Return the probability that the answer to a question is yes."""
        if question.instructions == self._need_question:
            return self._calibrator.fit_probability(self._router.trace(request))
        match = _SKILL_NAME.search(question.instructions)
        if match:
            return probabilities.get(match[1], 0.0)
        router = self._with_question(question.instructions)
        return self._probabilities(router, request).get(_QUESTION_ID, 0.0)

    def _probabilities(self, router: Router, request: str) -> dict[str, float]:
        """Return the probability of each skill that a router ranks for a request, by name."""
        trace = router.trace(request)
        names = [router.skills[skill_id].name for skill_id, _ in trace.ranking]
        values = self._calibrator.probabilities(trace).tolist()
        return dict(zip(reversed(names), reversed(values), strict=True))  # the best of equal names

    def _add_question(self, instructions: str) -> Router:
        """Return the router with a question as one more skill."""
        question = Skill(_QUESTION_ID, _QUESTION_ID, instructions, "")
        return self._router.with_skills([*self._router.skills.values(), question])
