"""Commands that answer: the skills for a request, and a page that shows training lists."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from skilltrain.cli.app import app, show
from skilltrain.config import parse_yaml, validate
from skilltrain.files import cache_folder


@app.command()
def route(
    request: Annotated[str, typer.Argument(help="a task in plain words")],
    pool: Annotated[Path, typer.Option(help="folder of the pool, or a folder of SKILL.md files")],
    encoder: Annotated[str | None, typer.Option(help="encoder; BM25 finds the candidates without one")] = None,
    reranker: Annotated[str | None, typer.Option(help="reranker for the top 20 candidates")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many skills to show")] = 5,
    first_weight: Annotated[
        float, typer.Option(min=0, help="order by reranker + weight x the score before; 1 for small rerankers")
    ] = 0.0,
    rankers: Annotated[str | None, typer.Option(help="any rankers, as in a recipe, in their place")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Find the skills for a task, those marked that the safety screening flags.

    The pool's vectors are kept in ~/.cache/skilltrain for the next request.

    Example: skilltrain route "merge these PDFs and stamp page numbers" --pool runs/pool --encoder runs/encoder

    Example: skilltrain route "merge these PDFs" --pool runs/pool --rankers "[{kind: fuse, of: [{kind: lexical},
    {kind: dense, source: runs/encoder}]}]"
    """
    from skilltrain.data.pool.read import read_pool
    from skilltrain.data.screening import read_flags
    from skilltrain.retrieval.cascade import SystemConfig
    from skilltrain.routing.router import route as find

    first = {"kind": "dense", "source": encoder, "cache": cache_folder("vectors")} if encoder else {"kind": "lexical"}
    second = [{"kind": "rerank", "source": reranker, "first_weight": first_weight}] if reranker else []
    chosen = parse_yaml(rankers, "--rankers") if rankers else [first, *second]
    system = validate(SystemConfig, {"name": "route", "rankers": chosen}, "route")
    found = find(request, read_pool(pool), system, top, read_flags(pool))
    if as_json:
        rows = [
            {"rank": r.rank, "score": r.score, "skill_id": r.skill.skill_id, "name": r.skill.name,
             "description": r.skill.description, "source": r.skill.source, "flags": [asdict(flag) for flag in r.flags]}
            for r in found
        ]  # fmt: skip
        typer.echo(json.dumps({"request": request, "skills": rows}, ensure_ascii=False, indent=1))
        return
    for routed in found:
        skill = routed.skill
        typer.echo(f"{routed.rank:>2}  {routed.score:8.4f}  {_printable(skill.skill_id)}")
        typer.echo(f"                {_printable(skill.description)[:90]}")
        for flag in reversed({flag.rule: flag for flag in reversed(routed.flags)}.values()):  # one a rule
            typer.echo(f"    !! FLAGGED {flag.rule}: {flag.reason}; in its {flag.field}: {_printable(flag.span)[:120]}")


def _printable(text: str) -> str:
    """Untrusted text without the control characters by which it could steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))


@app.command("inspect")
def inspect_lists(
    lists: Annotated[Path, typer.Argument(help="folder of the stage lists")],
    out: Annotated[Path | None, typer.Option(help="page to write; else LISTS.html beside the folder")] = None,
    pool: Annotated[Path | None, typer.Option(help="pool, where the one that the lists name has moved")] = None,
    max_lists: Annotated[int, typer.Option(min=1, help="lists to show; of more, a sample")] = 2000,
) -> None:
    """Write one HTML page that shows training lists: counts, plots, what filters dropped, every query to search.

    Example: skilltrain inspect runs/lists --out lists.html
    """
    from skilltrain.report.lists import inspect_lists as inspect

    with redirect_stdout(sys.stderr):
        found = inspect(lists, out, pool, max_lists)
    show(found)
