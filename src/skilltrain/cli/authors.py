"""Commands for authors of skills: tests of a router, and faults of skills."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from skilltrain.cli.app import AsJson, app, conclude, quietly
from skilltrain.files import write_text


@app.command(rich_help_panel="Use")
def test(
    router: Annotated[
        Path, typer.Argument(help="folder that `skilltrain fit` or `skilltrain index` wrote")
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(help="folder of skills; default: that of the router's skills"),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="file to write the results to, as JUnit XML")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test a router with the evals/trigger-eval.json of skills. The exit code is 1 if a test fails.

    Example: skilltrain test runs/router my_skills --junit results.xml
    """
    from skilltrain.data.trigger_evals import read_trigger_evals
    from skilltrain.serving.index import Index
    from skilltrain.serving.router import Router
    from skilltrain.serving.routing_tests import describe_failure, junit_xml, run_routing_tests

    folders = [folder] if folder else Index.open(router).sources
    queries = read_trigger_evals(*folders)
    failures = quietly(run_routing_tests, quietly(Router.load, router), queries)
    if junit:
        write_text(junit, junit_xml(queries, failures))

    lines = [f"FAILED '{failure.query}': {describe_failure(failure)}" for failure in failures]
    lines.append(f"{len(queries) - len(failures)} of {len(queries)} queries passed")
    rows = [asdict(failure) for failure in failures]
    conclude({"num_queries": len(queries), "failures": rows}, lines, as_json)
    if failures:
        raise typer.Exit(1)


@app.command(rich_help_panel="Data")
def lint(
    folder: Annotated[Path, typer.Argument(help="folder of SKILL.md files")],
    as_json: AsJson = False,
) -> None:
    """Find faults of skills that keep agents from using the right one. If any, the exit code is 1.

    Example: skilltrain lint my_skills
    """
    from skilltrain.serving.lint import lint as find_faults

    findings = quietly(find_faults, folder)
    lines: list[str] = []
    for finding in findings:
        subject = finding.skill_id or folder
        lines.append(f"{subject}: {finding.rule}: {finding.problem} ({finding.fix})")
    lines.append(f"{len(findings)} findings")
    conclude({"findings": [asdict(finding) for finding in findings]}, lines, as_json)
    if findings:
        raise typer.Exit(1)
