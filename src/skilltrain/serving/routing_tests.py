"""Routing tests: whether a router starts the skills that trigger evaluations expect.

Notes:
    - A query fails if its first skill is another one, or if the router says that no skill fits.
    - A query that no skill is expected to serve fails only for a skill that it should not start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from skilltrain.data.trigger_evals import TriggerQuery
from skilltrain.serving.answer import Answer
from skilltrain.serving.router import Router
from skilltrain.texts import printable

_DEPTH = 20  # skills among which an expected one is looked for
_MAX_CHARS = 500  # of a text in a report


@dataclass(frozen=True)
class RoutingFailure:
    """A query that does not start the skill that it should.

    Attributes:
        query: Text of the query.
        where: File and row of the query.
        expected: Ids of the skills that should start. Empty: the first one should not start.
        actual: Id of the first skill. None: the router says that no skill fits.
        rank: Best rank of an expected skill. None: it is not among the first 20.
        reason: Why the test fails.
    """

    query: str
    where: str
    expected: Sequence[str]
    actual: str | None
    rank: int | None
    reason: str


def run_routing_tests(router: Router, queries: Sequence[TriggerQuery]) -> list[RoutingFailure]:
    """Route all queries, and return those that fail."""
    failures: list[RoutingFailure] = []
    for query in queries:
        answer = router.route(query.text, _DEPTH)
        actual = answer.skills[0].skill_id if answer.fits else None
        passes = actual in query.expected if query.expected else actual not in query.unexpected
        if passes:
            continue
        ranks = [skill.rank for skill in answer.skills if skill.skill_id in query.expected]
        rank = min(ranks, default=None)
        reason = _reason(router, query, answer)
        failures.append(
            RoutingFailure(query.text, query.where, query.expected, actual, rank, reason)
        )
    return failures


def _reason(router: Router, query: TriggerQuery, answer: Answer) -> str:
    """Return why a query fails."""
    if query.expected and router.skills.keys().isdisjoint(query.expected):
        return "the router does not have the skill"
    if not answer.fits:
        return "the router says that no skill fits"
    return str(answer.skills[0].why)


def junit_xml(queries: Sequence[TriggerQuery], failures: Sequence[RoutingFailure]) -> str:
    """Return the results as JUnit XML, with a test case for each query."""
    failure_by_place = {failure.where: failure for failure in failures}
    attributes = {"name": "skilltrain test", "tests": str(len(queries))}
    suite = ElementTree.Element("testsuite", attributes | {"failures": str(len(failures))})
    for query in queries:
        skills = ", ".join(query.expected) or f"not {', '.join(query.unexpected)}"
        names = {"classname": _text(skills), "name": _text(query.text)}
        case = ElementTree.SubElement(suite, "testcase", names)
        failure = failure_by_place.get(query.where)
        if failure:
            message = _text(describe_failure(failure))
            ElementTree.SubElement(case, "failure", message=message).text = _text(failure.where)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def describe_failure(failure: RoutingFailure) -> str:
    """Return the expected skill, its rank, the actual skill and the reason on one line."""
    actual = failure.actual or "no skill"
    if not failure.expected:
        return f"{actual} should not be first ({failure.reason})"
    rank = f"rank {failure.rank}" if failure.rank else f"not among the first {_DEPTH}"
    expected = " or ".join(failure.expected)
    return f"expected {expected} ({rank}), got {actual} ({failure.reason})"


def _text(text: str) -> str:
    """Return a text that XML can hold."""
    return printable(text, _MAX_CHARS)
