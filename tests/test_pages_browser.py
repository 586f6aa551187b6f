"""The report and the page of `skilltrain inspect` in a real browser."""

from collections.abc import Iterator

import pytest

from headless_chromium import CHROMIUM, Page, browser
from invented_report import invented
from skilltrain.evaluation.inspect_data import inspect_lists
from skilltrain.evaluation.page import html_page
from skilltrain.evaluation.write import write_report
from test_inspect import DROPS, EVIL, POOL, ROWS, TEXTS, write_runs

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

LOOKS = [(1280, False), (390, True), (390, False), (1280, True)]
HOSTILE = EVIL + "<svg onload=alert(3)><a href='javascript:alert(4)'>x</a>${alert(5)}\u200b"
NUM_MORE = 30  # lists beside the three of TEXTS, so that there is a second page


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Iterator[Page]:
    """A browser with the report of invented systems that have hostile names and texts."""
    root = tmp_path_factory.mktemp("browser")
    write_report(invented(24), root)
    with browser(root / "report.html") as page:
        yield page


@pytest.fixture(scope="module")
def lists(tmp_path_factory) -> Iterator[Page]:
    """A browser with the page of small lists that have hostile texts."""
    root = tmp_path_factory.mktemp("browser")
    pool = POOL | {"z/tu": (HOSTILE, HOSTILE, HOSTILE * 20, None, "zh", HOSTILE)}
    texts = (
        TEXTS
        | {"q3": f"draw it {HOSTILE}"}
        | {f"more{n}": f"question number {n}" for n in range(NUM_MORE)}
    )
    rows = ROWS | {f"more{n}": ROWS["q1"] for n in range(NUM_MORE)}
    inspect_lists(write_runs(root, pool=pool, texts=texts, lists=rows), None, None, 100)
    with browser(root / "lists.html") as page:
        yield page


@pytest.fixture(autouse=True)
def quiet(request) -> Iterator[None]:
    """Check after each test that nothing was logged, opened or requested, except the page."""
    yield
    for name in {"report", "lists"} & set(request.fixturenames):
        page = request.getfixturevalue(name)
        page.check_quiet()
        address = page.run("location.href").partition("#")[0]
        assert {url.partition("#")[0] for url in page.requests} == {address}


def search(page: Page, section: str, words: str) -> None:
    """Type into the search box of a section."""
    typed = f"box => {{ box.value = {words!r}; box.dispatchEvent(new Event('input')) }}"
    page.run(f"({typed})(document.querySelector('#{section} input[type=search]'))")


def text_of(page: Page, selector: str) -> str:
    """Return the text of the first element."""
    return page.run(f"document.querySelector({selector!r}).textContent")


# The report -------------------------------------------------------------------


def visible_texts(page: Page, selector: str) -> list[str]:
    """Return the texts of the visible elements."""
    return page.run(
        f"[...document.querySelectorAll({selector!r})].filter(node => node.getClientRects().length)"
        ".map(node => node.textContent)"
    )


def test_search_hides_other_queries(report: Page):
    all_entries = visible_texts(report, ".query")
    first_entries = [entry for entry in all_entries if "task-00" in entry]

    for words, matches in (
        ("TASK-00", first_entries),
        (".*[(", []),
        ("<img", all_entries),  # part of the hostile text
        ("", all_entries),
    ):
        search(report, "queries", words)

        assert text_of(report, "#queries output") == f"{len(matches)} found"
        assert visible_texts(report, ".query") == matches


def test_open_lists_show_hostile_texts(report: Page):
    report.run("document.querySelectorAll('details').forEach(node => node.open = true)")

    active = "main img, main script, main [onerror]"
    assert report.run(f"document.querySelectorAll('{active}').length") == 0
    texts = visible_texts(report, ".query .text")
    assert any("[U+202E]evil[U+2066][U+200B]" in text for text in texts)
    assert visible_texts(report, ".cases li")
    assert report.run("document.documentElement.scrollWidth") <= 1280
    report.run("document.querySelectorAll('details').forEach(node => node.open = false)")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_report_fits_every_screen(report: Page, width: int, dark: bool):
    """Nothing is outside the page, every picture has a name and texts have enough contrast."""
    report.check_fits(width, dark)

    boxes = (
        "[...document.querySelectorAll('figure svg text')]"
        ".map(node => node.getBoundingClientRect())"
    )
    is_outside = "box => box.left < 0 || box.right > innerWidth"
    assert report.run(f"{boxes}.filter({is_outside}).length") == 0
    assert report.run(CONTRASTS) == []


def test_dot_is_beside_the_first_line(report: Page):
    report.check_fits(390, dark=False)

    distances = report.run(DISTANCES_OF_DOTS)

    assert len(distances) > 30
    assert all(0 < distance < 20 for distance in distances)


def test_sticky_names_keep_lines_of_rows(report: Page):
    """Only borders that belong to a cell move with it; collapsed ones belong to the table."""
    styles = "[...document.querySelectorAll('table')].map(node => getComputedStyle(node))"

    assert set(report.run(f"{styles}.map(style => style.borderCollapse)")) == {"separate"}


# The page of lists ------------------------------------------------------------


def click(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")


@pytest.mark.parametrize(
    ("words", "query_ids"),
    [
        ("k8s q2", ["q2"]),  # the name of a candidate
        ("KEEP failing", ["q2"]),  # words of the query
        ("same description", ["q2"]),  # a check that points at the list
        ("nothing-holds-this", []),
        (".*[(", []),
    ],
)
def test_search_finds_lists_by_their_texts(lists: Page, words: str, query_ids: list[str]):
    search(lists, "lists", words)

    assert visible_texts(lists, "#lists .asked h3") == query_ids
    assert text_of(lists, "#lists output") == f"{len(query_ids)} found"


def test_lists_come_a_page_at_a_time(lists: Page):
    search(lists, "lists", "")
    first = visible_texts(lists, "#lists .asked h3")

    click(lists, "#lists .pages button:last-child")

    assert len(first) == 10
    assert not set(first) & set(visible_texts(lists, "#lists .asked h3"))
    assert text_of(lists, "#lists .pages span") == "2 of 4"


def test_opened_candidate_shows_its_texts(lists: Page):
    search(lists, "lists", "k8s q2")
    rows = lists.run(
        "[...document.querySelectorAll('#lists article:not(.off-page) .entries li')]"
        ".map(row => [row.className, ...['.from', 'b', '.verdict']"
        ".map(part => row.querySelector(part).textContent)])"
    )

    click(lists, "#lists article:not(.off-page) li:nth-child(2) summary")

    assert rows[0] == ["positive odd", "gold ", "pods", "required"]
    assert rows[1] == [" odd", "semantic 2", "k8s", "irrelevant"]
    assert visible_texts(lists, "#lists .more pre")[0].startswith("pods pods")


def test_drops_are_searched_by_filter(lists: Page):
    search(lists, "drops", "jaccard")

    bodies = visible_texts(lists, "#drops pre")
    search(lists, "drops", "")
    filters = [title.split()[0] for title in visible_texts(lists, "#drops h3")]
    assert [body.endswith("differently") for body in bodies] == [True, False]
    assert filters == [drop.filter for drop in DROPS]


def test_hostile_texts_stay_texts(lists: Page):
    active = "main img, main a:not(nav a), main script, main [onload], main [onerror]"
    search(lists, "lists", "<img")

    names = visible_texts(lists, "#lists .what b")
    name = next(name for name in names if "onerror" in name)
    assert lists.run(f"document.querySelectorAll({active!r}).length") == 0
    assert lists.run("document.querySelectorAll('script').length") == 1
    assert name == HOSTILE.replace("\u2028", "[U+2028]").replace("\u202e", "[U+202E]").replace(
        "\u200b", "[U+200B]"
    )


@pytest.mark.parametrize(("width", "dark"), LOOKS[:2])
def test_page_of_lists_fits_every_screen(lists: Page, width: int, dark: bool):
    lists.check_fits(width, dark)
    assert lists.run(CONTRASTS) == []


def test_bars_stay_inside_their_rows(tmp_path):
    file = tmp_path / "gradients.html"
    row = {"at": "scores", "part": "required", "num": 8, "norm": 0.1, "share": 0.5}
    row |= {"survival": 1.0, "cosine": 1.0, "slope": 0.1}
    about = {"loss": {"name": "infonce"}, "stage": "train_encoder", "model": "base"}
    about |= {"num_batches": 1, "gains": {"required": 1}}
    file.write_text(html_page("gradients", about=about, locations=["scores"], rows=[row]))

    with browser(file) as page:
        heights = page.run(
            "[...document.querySelectorAll('td .bar')].map(bar => "
            "bar.getBoundingClientRect().height / bar.closest('tr').getBoundingClientRect().height)"
        )

    assert len(heights) == 2
    assert max(heights) < 0.5


# Pixels from the top of the first line of a name down to the top of the dot before it.
DISTANCES_OF_DOTS = """(() => {
  const dots = [...document.querySelectorAll('th .swatch')];
  return dots.filter(dot => dot.getClientRects().length).map(dot => {
    const name = document.createRange();
    name.selectNodeContents(dot.nextSibling);
    return dot.getBoundingClientRect().top - name.getClientRects()[0].top;
  });
})()"""

# Elements whose text has less than 4.5 to 1 contrast (WCAG) to the first opaque background.
CONTRASTS = """(() => {
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = parts(color).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (parts(color).length === 3 || parts(color)[3] === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const low = new Set();
  for (const node of document.querySelectorAll("main *")) {
    const hasText = [...node.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!hasText || !node.getClientRects().length) continue;
    if (node.matches(".inside")) continue;  // on a disc
    const style = getComputedStyle(node), svg = node.closest("svg");
    const color = svg ? style.fill : style.color;
    const pair = [light(color), light(ground(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    const name = `${node.tagName}.${node.getAttribute("class")}`;
    if (ratio < 4.5) low.add(`${name}: ${ratio.toFixed(2)}`);
  }
  return [...low];
})()"""
