"""The parts of the page that only count: tables and plots over all lists, readable without a script."""

from collections.abc import Mapping, Sequence

import numpy as np

from skilltrain.data.inspection import counts, plots
from skilltrain.data.inspection.checks import Check
from skilltrain.data.inspection.counts import Flow, Shares
from skilltrain.data.inspection.material import Material
from skilltrain.data.inspection.plots import percent, text

NUM_COLORS = 8
NUM_FLAGGED = 50  # flagged skills listed; those in lists first


def color(flow: Flow, source: str) -> str:
    """The colour class of a source, the same everywhere on the page."""
    return f"c{flow.sources.index(source) % NUM_COLORS}" if source in flow.sources else "plain"


def table(label: str, head: Sequence[str], rows: str, kind: str = "") -> str:
    """A table that scrolls sideways where it must."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}"><table class="{kind}">'
        f"<thead><tr>{cells}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
    )


def overview(material: Material, flow: Flow) -> str:
    """The way from pool to negatives, in one number each."""
    entries = material.entries
    positives, negatives = int(entries.positive.sum()), int((~entries.positive).sum())
    num_lists = len(material.query_ids)
    tiles = [
        ("Pool", material.num_pool, "skills"),
        ("Mined", None if flow.mined is None else flow.mined.total(), "candidates"),
        ("Dropped", flow.num_dropped if material.kept is not None else None, _dropped_share(flow)),
        ("Kept", None if flow.kept is None else flow.kept.total(), "candidates"),
        ("Chosen", negatives, f"negatives, {negatives / max(1, num_lists):.3g} a list"),
        ("Lists", num_lists, f"with {positives:,} positive{'' if positives == 1 else 's'}"),
    ]
    shown = "".join(
        f'<li class="{name.lower()}"><span>{name}</span><b>{"?" if number is None else f"{number:,}"}</b>'
        f"<small>{text(note) if number is not None else 'not found'}</small></li>"
        for name, number, note in tiles
    )
    return f'<ol class="way" aria-label="From the pool to the lists">{shown}</ol>'


def _dropped_share(flow: Flow) -> str:
    return f"false negatives, {percent(flow.num_dropped, flow.mined.total())}" if flow.mined else "false negatives"


def check_list(checks: Sequence[Check], num_lists: int, flow: Flow) -> str:
    """What was found, each with a button that shows its lists; what was asked and not found in one line."""
    lost = {source: n for source in flow.sources if (n := flow.unaccounted(source))}
    found = "".join(
        f"<li><b>{len(check.lists):,}</b><div><h3>{text(check.title)}</h3><p>{text(check.meaning)} "
        f"{percent(len(check.lists), num_lists)} of the lists.</p></div>"
        f'<button type="button" data-check="{check.key}">Show these lists</button></li>'
        for check in checks
        if len(check.lists)
    )
    for source, number in lost.items():
        said = "vanished without a row that says why" if number > 0 else "have a row in DROPPED and are still there"
        found += (
            f"<li><b>{abs(number):,}</b><div><h3>Candidates of {text(source)} {said}</h3><p>Mined, dropped and kept "
            "do not add up: the runs of this trail do not belong together.</p></div></li>"
        )
    clean = [check.title for check in checks if not len(check.lists)]
    passed = "".join(f"<li>{text(title)}</li>" for title in clean)
    nothing = "" if found else "<p>Nothing: no list breaks an assumption that could be checked.</p>"
    return (
        '<section id="checks"><h2>Worth a look</h2>'
        f"{nothing}"
        + (f'<ul class="checks">{found}</ul>' if found else "")
        + (
            f'<details class="passed"><summary>{len(clean)} checks found nothing</summary><ul>{passed}</ul></details>'
            if clean
            else ""
        )
        + "</section>"
    )


def flow_table(material: Material, flow: Flow) -> str:
    """Sources down, layers across: what was dropped, with bars; what was dropped elsewhere below."""
    highest = max(flow.dropped.values(), default=0)
    head = ["Source", "Mined", *(f"{text(layer)}" for layer in flow.layers), "Kept", "Chosen"]
    rows = ""
    for source in flow.sources:
        mined = flow.mined[source] if flow.mined else 0
        cells = "".join(
            _drop_cell(flow.dropped[source, layer], mined, highest, color(flow, source)) for layer in flow.layers
        )
        rows += (
            f'<tr><th scope="row">{_swatch(flow, source)}{text(source)}</th>{_number(flow.mined, source)}{cells}'
            f"{_number(flow.kept, source)}<td><b>{flow.chosen[source]:,}</b></td></tr>"
        )
    sums = "".join(f"<td>{sum(flow.dropped[s, layer] for s in flow.sources):,}</td>" for layer in flow.layers)
    total = [None if counter is None else counter.total() for counter in (flow.mined, flow.kept)]
    mined, kept = ("<td>?</td>" if number is None else f"<td>{number:,}</td>" for number in total)
    rows += f'<tr class="sum"><th scope="row">all</th>{mined}{sums}{kept}<td>{flow.chosen.total():,}</td></tr>'
    note = "" if flow.layers else "<p>No filter was found between mining and lists, so nothing is known of drops.</p>"
    return (
        '<section id="sources"><h2>From candidates to negatives</h2>'
        "<p>Candidates by source and, in the middle, what each layer of the filter took out. A candidate that two "
        f"sources found counts twice.</p>{note}"
        f"{table('Candidates by source and layer', head, rows, 'flow')}{_other_drops(material)}</section>"
    )


def _swatch(flow: Flow, source: str) -> str:
    return f'<i class="swatch {color(flow, source)}"></i>'


def _number(counter: Mapping[str, int] | None, source: str) -> str:
    return "<td>?</td>" if counter is None else f"<td><b>{counter[source]:,}</b></td>"


def _drop_cell(count: int, mined: int, highest: int, kind: str) -> str:
    if not count:
        return '<td class="none">0</td>'
    share = f" <small>{percent(count, mined)}</small>" if mined else ""
    return f"<td><b>{count:,}</b>{share}{plots.bar(count, highest, kind)}</td>"


def _other_drops(material: Material) -> str:
    rows = "".join(
        f'<tr><th scope="row">{text(drop.stage)}</th><td>{text(drop.filter)}</td><td><b>{drop.count:,}</b></td>'
        f'<td class="words" dir="auto">{text(drop.example)}</td></tr>'
        for drop in material.other_drops
    )
    if not rows:
        return "<p>No query, list or skill was dropped by the other stages that were found.</p>"
    head = ("Stage", "Filter", "Dropped", "For example")
    return f"<h3>Queries, lists and skills dropped</h3>{table('Dropped by other stages', head, rows, 'others')}"


def sources(material: Material, flow: Flow) -> str:
    """Negatives a list by source, and the ranks they were taken from."""
    quotas = counts.quotas_of(material)
    each = ""
    for source in (source for source in flow.sources if flow.chosen[source]):
        found, kind = counts.per_list(material, source), color(flow, source)
        quota = None if quotas is None or source not in quotas else quotas[source]
        wanted = "" if quota is None else f", quota {quota}"
        lacking = 0 if quota is None else sum(n for number, n in found.items() if number < quota)
        note = f" <em>{lacking:,} list{'' if lacking == 1 else 's'} below it</em>" if lacking else ""
        mean = sum(number * lists for number, lists in found.items()) / max(1, found.total())
        at = plots.counted(counts.ranks(material, source))
        bins = plots.bins_for(at)
        each += plots.figure(
            f"{_swatch(flow, source)}{text(source)}",
            f'<p class="row"><span>{mean:.2f} a list{wanted}</span>{note}</p>{_small_table(found)}'
            + plots.histogram("rank", at, bins, kind),
            plots.axis(bins, "rank"),
        )
    if (held := counts.ranks(material, None)).total():
        at = plots.counted(held)
        bins = plots.bins_for(at)
        missed = int((material.entries.positive & (material.entries.rank == 0)).sum())
        each += plots.figure(
            "Positives", f'<p class="row"><span>{missed:,} were not found by the ranking</span></p>'
            + plots.histogram("found at rank", at, bins, "pos"), plots.axis(bins, "rank"),
        )  # fmt: skip
    return (
        '<section id="ranks"><h2>Negatives by source</h2><p>How many a list holds, and at which rank of its source '
        f'each stood: low ranks are the hard ones.</p><div class="figures">{each}</div></section>'
    )


def _small_table(found: Mapping[int, int]) -> str:
    """Negatives a list → lists, the most frequent numbers first."""
    ordered = sorted(found, key=lambda number: -found[number])
    shown = "".join(f"<li><b>{number}</b> in {found[number]:,} lists</li>" for number in ordered[:4])
    rest = sum(found[number] for number in ordered[4:])
    more = f"<li>other numbers in {rest:,}</li>" if rest else ""
    return f'<ul class="perlist">{shown}{more}</ul>'


def length_plots(material: Material) -> str:
    """Words of queries, and characters of positives' and negatives' bodies on one axis."""
    found = counts.lengths(material)
    words = plots.bins_for(found.query_words)
    queries = plots.figure(
        "Queries", plots.histogram("all queries", found.query_words, words, "plain"), plots.axis(words, "words")
    )
    both = np.concatenate([found.positive_chars, found.negative_chars])
    if not len(both):
        return _section("lengths", "Lengths", "No pool was found: only queries have a length.", queries)
    chars = plots.bins_for(both)
    bodies = plots.figure(
        "Bodies of skills",
        plots.histogram("positives", found.positive_chars, chars, "pos")
        + plots.histogram("negatives", found.negative_chars, chars, "neg"),
        plots.axis(chars, "characters" + (", logarithmic" if chars.logarithmic else "")),
    )
    said = "Each skill counts as often as lists hold it. A model that can tell positives by their length will."
    return _section("lengths", "Lengths", said, f'<div class="figures two">{queries}{bodies}</div>')


def _section(key: str, title: str, said: str, content: str) -> str:
    return f'<section id="{key}"><h2>{title}</h2><p>{text(said)}</p>{content}</section>'


def share_plots(material: Material) -> str:
    """Categories and languages of positives beside those of negatives."""
    if material.num_pool is None:
        return ""
    parts = ""
    for column, title in (("category", "Categories"), ("lang", "Languages"), ("source", "Collections")):
        found = counts.shares(material, column)
        more = (
            f"; the {len(found.rows)} largest of {found.num_values} are shown"
            if found.num_values > len(found.rows)
            else ""
        )
        same = f"{percent(found.same, found.comparable)} of the negatives have that of their list’s positive{more}."
        cut = -(-len(found.rows) // 2) if len(found.rows) > 8 else len(found.rows)
        halves = [found.rows[:cut], found.rows[cut:]]
        tables = "".join(_share_table(title, half, found) for half in halves if half)
        parts += f'<h3>{title}</h3><p>{same}</p><div class="halves">{tables}</div>'
    legend = '<p class="legend"><i class="swatch pos"></i>positives <i class="swatch neg"></i>negatives</p>'
    return f'<section id="shares"><h2>Categories, languages and collections</h2>{legend}{parts}</section>'


def _share_table(title: str, rows: Sequence[counts.Share], found: Shares) -> str:
    highest = max(
        (max(r.positives / max(1, found.positives), r.negatives / max(1, found.negatives)) for r in found.rows),
        default=1,
    )
    cells = "".join(
        f'<tr><th scope="row"><bdi>{text(row.value)}</bdi></th>'
        f'<td class="pair">{plots.bar(row.positives / max(1, found.positives), highest, "pos")}'
        f"{plots.bar(row.negatives / max(1, found.negatives), highest, 'neg')}</td>"
        f'<td title="{row.positives:,} positives">{percent(row.positives, found.positives)}</td>'
        f'<td title="{row.negatives:,} negatives">{percent(row.negatives, found.negatives)}</td></tr>'
        for row in rows
    )
    return table(f"{title}, share of positives and of negatives", (title, "", "pos.", "neg."), cells, "shares")


def hub_table(material: Material, flow: Flow) -> str:
    """The skills that serve as negatives most often, by source."""
    found = counts.hubs(material)
    names, ids = material.texts_of("name"), material.ids()
    highest = max((hub.count for hub in found.top), default=1)
    rows = ""
    for hub in found.top:
        parts = [(count, color(flow, source)) for source, count in hub.by_source.most_common()]
        said = ", ".join(f"{count} {source}" for source, count in hub.by_source.most_common())
        rows += (
            f'<tr><th scope="row"><button type="button" class="link" data-skill="{text(ids[hub.skill])}">'
            f"<bdi>{text(names[hub.skill])}</bdi></button> <small><bdi>{text(ids[hub.skill])}</bdi></small></th>"
            f'<td class="wide" title="{text(said)}">{plots.stacked(parts, highest)}</td><td><b>{hub.count:,}</b></td>'
            f"<td>{hub.positive_count:,}</td></tr>"
        )
    times = found.times
    once = percent(times[1], times.total())
    said = (
        f"{times.total():,} skills serve as negatives, {once} of them once, one {max(times, default=0):,} times; "
        f"the {len(found.top)} below make up {percent(100 * found.top_share, 100)} of all negatives. A skill that is a "
        "negative everywhere and a positive nowhere is learned as wrong, whatever the query."
    )
    head = ("Skill", "Lists by source", "Lists", "Positive of")
    return _section("hubs", "Negatives that recur", said, table("Most frequent negatives", head, rows, "hubs"))


def flag_table(material: Material) -> str:
    """Flagged skills, those in lists first; a line where the pool was not screened."""
    if material.flags is None:
        said = "No table of flags lies beside the pool: it was not screened."
        return _section("flags", "Flagged skills", said, "")
    entries, rows = material.entries, material.flags.to_pylist()
    serves = np.bincount(entries.skill[~entries.positive], minlength=material.skills.num_rows)
    wanted = np.bincount(entries.skill[entries.positive], minlength=material.skills.num_rows)
    used = {skill_id: (int(wanted[row]), int(serves[row])) for skill_id, row in material.position.items()}
    rows.sort(key=lambda row: tuple(-n for n in used.get(row["skill_id"], (0, 0))))
    body = "".join(
        f'<tr><th scope="row"><button type="button" class="link" data-skill="{text(row["skill_id"])}">'
        f"<bdi>{text(row['skill_id'])}</bdi></button></th><td>{text(row['rule'])}</td>"
        f'<td class="words"><code dir="auto">{text(row["span"][:200])}</code><small>{text(row["reason"])}</small></td>'
        + "".join(f"<td>{number:,}</td>" for number in used.get(row["skill_id"], (0, 0)))
        + "</tr>"
        for row in rows[:NUM_FLAGGED]
    )
    flagged = {row["skill_id"] for row in rows}
    as_positive, as_negative = (sum(bool(used[i][k]) for i in flagged & used.keys()) for k in (0, 1))
    said = (
        f"{len(flagged):,} skills of the pool are flagged; {as_positive:,} of them are a positive of a list and "
        f"{as_negative:,} a negative."
        + (f" {NUM_FLAGGED} of {len(rows):,} findings are shown." if len(rows) > NUM_FLAGGED else "")
    )
    head = ("Skill", "Rule", "Found", "Positive of", "Negative of")
    return _section("flags", "Flagged skills", said, table("Flagged skills", head, body, "flags") if rows else "")
