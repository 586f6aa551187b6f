"""The report and the page of `skilltrain inspect` in a real browser: widths, colours, search, and hostile texts."""

from collections.abc import Iterator

import pytest

from headless_chromium import CHROMIUM, Page, browser
from invented_report import invented
from skilltrain.report.lists import inspect_lists
from skilltrain.report.write import write_report
from test_inspect import DROPS, EVIL, POOL, ROWS, TEXTS, write_runs

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

LOOKS = [(1280, False), (390, True), (390, False), (1280, True)]
HOSTILE = EVIL + "<svg onload=alert(3)><a href='javascript:alert(4)'>x</a>${alert(5)}\u200b"
NUM_MORE = 30  # lists beside the three of TEXTS, so that there is a second page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser that shows the report of invented systems with hostile names and texts."""
    root = tmp_path_factory.mktemp("browser")
    write_report(invented(24), root)
    with browser(root / "report.html") as page:
        yield page


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser that shows the page of the small lists, hostile texts among them."""
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
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, nothing is logged, no dialog opens and nothing but the page itself is asked for."""
    yield
    for page in (
        request.getfixturevalue(name)
        for name in ("report", "lists")
        if name in request.fixturenames
    ):
        page.check_quiet()
        assert {url.partition("#")[0] for url in page.requests} == {
            page.run("location.href").partition("#")[0]
        }


def search(page: Page, words: str, box: str = "list-search") -> None:
    """Type into a search box."""
    typed = f"box => {{ box.value = {words!r}; box.dispatchEvent(new Event('input')) }}"
    page.run(f"({typed})(document.getElementById('{box}'))")


def text_of(page: Page, selector: str) -> str:
    return page.run(f"document.querySelector({selector!r}).textContent")


# The report ----------------------------------------------------------------------------------------------------------


def shown(page: Page, selector: str) -> list[str]:
    """The texts of the elements that take room on the page."""
    return page.run(
        f"[...document.querySelectorAll({selector!r})].filter(node => node.getClientRects().length)"
        ".map(node => node.textContent)"
    )


def test_search_finds_texts_and_names_and_leaves_the_rest(report: Page):
    every = shown(report, ".query")
    some = [entry for entry in every if "task-00" in entry]
    for words, found in (
        ("TASK-00", some),
        (".*[(", []),
        ("<img", every),
        ("", every),
    ):  # the hostile text, as text
        search(report, words, "search")
        assert (
            text_of(report, "#found") == f"{len(found)} found" and shown(report, ".query") == found
        )


def test_lists_open_and_hostile_texts_stay_texts(report: Page):
    report.run("document.querySelectorAll('details').forEach(node => node.open = true)")
    assert (
        report.run("document.querySelectorAll('main img, main script, main [onerror]').length") == 0
    )
    assert any("[U+202E]evil[U+2066][U+200B]" in words for words in shown(report, ".query .text"))
    assert shown(report, ".cases li")
    assert report.run("document.documentElement.scrollWidth") <= 1280
    report.run("document.querySelectorAll('details').forEach(node => node.open = false)")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_nothing_runs_out_of_the_page_everything_has_a_name_and_texts_stand_out(
    report: Page, width: int, dark: bool
):
    report.check_fits(width, dark)
    spilled = "[...document.querySelectorAll('figure svg text')].map(node => node.getBoundingClientRect())"
    assert (
        report.run(f"{spilled}.filter(box => box.left < 0 || box.right > innerWidth).length") == 0
    )
    assert report.run(CONTRASTS) == []


# The page of lists ---------------------------------------------------------------------------------------------------


def shown_lists(page: Page) -> list[str]:
    return page.run(
        "[...document.querySelectorAll('#list-rows article h3')].map((node) => node.textContent)"
    )


def click(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")


def test_search_finds_queries_names_bodies_and_ids(lists: Page):
    search(lists, "")
    assert (
        text_of(lists, "#list-found") == f"{NUM_MORE + 3} lists" and len(shown_lists(lists)) == 10
    )
    for words, found in (
        ("k8s", ["q2"]),
        ("skill:t/pods", ["q2"]),
        ("draw chart q3", ["q3"]),
        ("nothing-holds-this", []),
        (".*[(", []),
        ("KEEP failing", ["q2"]),
    ):  # a candidate's name, its id, several words, none, no pattern, and words of the query
        search(lists, words)
        assert shown_lists(lists) == found, words
    assert text_of(lists, "#list-found") == f"1 of {NUM_MORE + 3} lists"
    marked = lists.run(
        "[...document.querySelectorAll('.asked mark')].map(node => node.textContent)"
    )
    assert marked == ["keep", "failing"]


def test_lists_come_a_page_at_a_time(lists: Page):
    search(lists, "")
    first = shown_lists(lists)
    click(lists, "#list-pages button:last-child")
    assert not set(first) & set(shown_lists(lists))
    assert text_of(lists, "#list-pages span") == "2 of 4"
    click(lists, "#list-pages button:first-child")
    assert shown_lists(lists) == first
    assert lists.run("document.querySelector('#list-pages button').disabled")


def test_a_candidate_opens_and_shows_its_texts(lists: Page):
    search(lists, "skill:t/pods")
    rows = lists.run(
        "[...document.querySelectorAll('.entries li')].map(row => "
        "[row.className, ...['.from', 'b', '.verdict'].map(part => row.querySelector(part).textContent)])"
    )
    assert rows[0] == ["positive odd", "gold", "pods", "required"]
    assert rows[1] == ["odd", "semantic 2", "k8s", "irrelevant"]
    assert not lists.run("document.querySelector('#list-rows .more')")
    click(lists, ".entries li:nth-child(2) summary")
    lists.run(
        "new Promise(done => setTimeout(done, 50))"
    )  # the browser tells of an opened element a moment later
    assert text_of(lists, "#list-rows .more pre").startswith("pods pods")
    assert "body of 150 characters" in text_of(lists, "#list-rows .more")
    click(lists, ".entries li:nth-child(2) summary")
    assert not lists.run("document.querySelector('.entries li:nth-child(2) details').open")


def test_drops_are_filtered_by_filter_and_search(lists: Page):
    filters = (
        "[...document.querySelectorAll('#drop-rows article')].map(node => node.dataset.filter)"
    )
    assert sorted(lists.run(filters)) == sorted(drop.filter for drop in DROPS)
    click(lists, "input[name=filter][value=jaccard]")
    assert lists.run(filters) == ["jaccard"]
    assert text_of(lists, "#drop-found") == "1 pair"
    bodies = lists.run(
        "[...document.querySelectorAll('#drop-rows pre')].map(node => node.textContent)"
    )
    assert [body.endswith("differently") for body in bodies] == [True, False]
    search(lists, "nothing", "drop-search")
    assert lists.run(filters) == []
    search(lists, "", "drop-search")
    click(lists, "input[name=filter][value='']")
    search(lists, "t/pods", "drop-search")
    assert lists.run(filters) == ["name"]
    search(lists, "", "drop-search")


def test_a_check_and_a_recurring_skill_lead_to_their_lists(lists: Page):
    click(lists, "button[data-check=same_text]")
    assert shown_lists(lists) == ["q2"]
    assert lists.run("document.activeElement.id") == "list-search"
    click(lists, ".hubs button[data-skill='s/join']")
    assert shown_lists(lists) == ["q1", "q3", *[f"more{n}" for n in range(8)]]
    lists.run("document.activeElement.blur()")
    lists.run(
        "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true, cancelable: true}))"
    )
    assert lists.run("document.activeElement.id") == "list-search"


def test_hostile_texts_stay_texts(lists: Page):
    search(lists, "skill:z/tu")
    lists.run("document.querySelectorAll('#list-rows summary').forEach(node => node.click())")
    lists.run("new Promise(done => setTimeout(done, 100))")
    assert (
        lists.run(
            "document.querySelectorAll('main img, main a:not(nav a), main script, main [onload]').length"
        )
        == 0
    )
    names = lists.run(
        "[...document.querySelectorAll('#list-rows b')].map(node => node.textContent)"
    )
    name = next(name for name in names if "onerror" in name)
    assert name == HOSTILE.replace("\u2028", "[U+2028]").replace("\u202e", "[U+202E]").replace(
        "\u200b", "[U+200B]"
    )
    assert lists.run("document.querySelectorAll('script').length") == 2
    search(lists, "<img")
    assert "q3" in shown_lists(lists)


@pytest.mark.parametrize(("width", "dark"), LOOKS[:2])
def test_nothing_runs_out_of_the_page_of_lists(lists: Page, width: int, dark: bool):
    lists.check_fits(width, dark)


# Every element with text of its own against the first ground below it that is not transparent: WCAG's 4.5 to 1.
CONTRASTS = """(() => {
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const [r, g, b] = parts(color).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
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
    if (!node.getClientRects().length || ![...node.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    if (node.matches(".inside")) continue;  // on a disc
    const style = getComputedStyle(node), svg = node.closest("svg");
    const pair = [light(svg ? style.fill : style.color), light(ground(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.add(`${node.tagName}.${node.getAttribute("class")}: ${ratio.toFixed(2)}`);
  }
  return [...low];
})()"""
