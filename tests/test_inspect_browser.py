"""The page of `skilltrain inspect` in a real browser: its script, its search, and texts that would like to be code."""

from collections.abc import Iterator

import pytest

from headless_chromium import CHROMIUM, Page, browser
from skilltrain.report.lists import inspect_lists
from test_inspect import DROPS, EVIL, POOL, ROWS, TEXTS, write_runs

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

HOSTILE = EVIL + "<svg onload=alert(3)><a href='javascript:alert(4)'>x</a>${alert(5)}\u200b"
NUM_MORE = 30  # lists beside the three of TEXTS, so that there is a second page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser that shows the page of the small lists, hostile texts among them."""
    root = tmp_path_factory.mktemp("browser")
    pool = POOL | {"z/tu": (HOSTILE, HOSTILE, HOSTILE * 20, None, "zh", HOSTILE)}
    texts = TEXTS | {"q3": f"draw it {HOSTILE}"} | {f"more{n}": f"question number {n}" for n in range(NUM_MORE)}
    lists = ROWS | {f"more{n}": ROWS["q1"] for n in range(NUM_MORE)}
    inspect_lists(write_runs(root, pool=pool, texts=texts, lists=lists), None, None, 100)
    with browser(root / "profile") as tab:
        tab.open(root / "lists.html")
        yield tab


@pytest.fixture(autouse=True)
def quiet(page: Page) -> Iterator[None]:
    """Whatever a test does, nothing is logged, no dialog opens and nothing but the page itself is asked for."""
    yield
    page.check_quiet()
    assert {url.partition(":")[0] for url in page.requests} == {"file"} and len(page.requests) <= len(WIDTHS) * 2 + 1


WIDTHS = [(1280, False), (390, True)]


def shown_lists(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('#list-rows article h3')].map((node) => node.textContent)")


def search(page: Page, words: str, box: str = "list-search") -> None:
    page.run(
        f"var box = document.getElementById('{box}'); box.value = {words!r}; box.dispatchEvent(new Event('input'))"
    )


def click(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")


def text_of(page: Page, selector: str) -> str:
    return page.run(f"document.querySelector({selector!r}).textContent")


def test_search_finds_queries_names_bodies_and_ids(page: Page):
    search(page, "")
    assert text_of(page, "#list-found") == f"{NUM_MORE + 3} lists"
    assert len(shown_lists(page)) == 10
    search(page, "KEEP failing")
    assert shown_lists(page) == ["q2"]
    assert page.run("[...document.querySelectorAll('.asked mark')].map(node => node.textContent)") == [
        "keep",
        "failing",
    ]
    search(page, "k8s")  # a candidate's name
    assert shown_lists(page) == ["q2"]
    search(page, "skill:t/pods")
    assert (shown_lists(page), text_of(page, "#list-found")) == (["q2"], f"1 of {NUM_MORE + 3} lists")
    search(page, "draw chart q3")
    assert shown_lists(page) == ["q3"]
    search(page, "nothing-holds-this")
    assert shown_lists(page) == []
    search(page, ".*[(")  # words are words, not patterns
    assert shown_lists(page) == []


def test_lists_come_a_page_at_a_time(page: Page):
    search(page, "")
    first = shown_lists(page)
    click(page, "#list-pages button:last-child")
    assert not set(first) & set(shown_lists(page))
    assert text_of(page, "#list-pages span") == "2 of 4"
    click(page, "#list-pages button:first-child")
    assert shown_lists(page) == first
    assert page.run("document.querySelector('#list-pages button').disabled")


def test_a_candidate_opens_and_shows_its_texts(page: Page):
    search(page, "skill:t/pods")
    rows = page.run(
        "[...document.querySelectorAll('.entries li')].map(row => "
        "[row.className, ...['.from', 'b', '.verdict'].map(part => row.querySelector(part).textContent)])"
    )
    assert rows[0] == ["positive odd", "gold", "pods", "required"]
    assert rows[1] == ["odd", "semantic 2", "k8s", "irrelevant"]
    assert not page.run("document.querySelector('#list-rows .more')")
    click(page, ".entries li:nth-child(2) summary")
    page.run("new Promise(done => setTimeout(done, 50))")  # the browser tells of an opened element a moment later
    assert text_of(page, "#list-rows .more pre").startswith("pods pods")
    assert "body of 150 characters" in text_of(page, "#list-rows .more")
    click(page, ".entries li:nth-child(2) summary")
    assert not page.run("document.querySelector('.entries li:nth-child(2) details').open")


def test_drops_are_filtered_by_filter_and_search(page: Page):
    filters = "[...document.querySelectorAll('#drop-rows article')].map(node => node.dataset.filter)"
    assert sorted(page.run(filters)) == sorted(drop[2] for drop in DROPS)
    click(page, "input[name=filter][value=jaccard]")
    assert page.run(filters) == ["jaccard"]
    assert text_of(page, "#drop-found") == "1 pair"
    bodies = page.run("[...document.querySelectorAll('#drop-rows pre')].map(node => node.textContent)")
    assert [body.endswith("differently") for body in bodies] == [True, False]
    search(page, "nothing", "drop-search")
    assert page.run(filters) == []
    search(page, "", "drop-search")
    click(page, "input[name=filter][value='']")
    search(page, "t/pods", "drop-search")
    assert page.run(filters) == ["name"]
    search(page, "", "drop-search")


def test_a_check_and_a_recurring_skill_lead_to_their_lists(page: Page):
    click(page, "button[data-check=same_text]")
    assert shown_lists(page) == ["q2"]
    assert page.run("document.activeElement.id") == "list-search"
    click(page, ".hubs button[data-skill='s/join']")
    assert shown_lists(page) == ["q1", "q3", *[f"more{n}" for n in range(8)]]
    page.run("document.activeElement.blur()")
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true, cancelable: true}))")
    assert page.run("document.activeElement.id") == "list-search"


def test_hostile_texts_stay_texts(page: Page):
    search(page, "skill:z/tu")
    page.run("document.querySelectorAll('#list-rows summary').forEach(node => node.click())")
    page.run("new Promise(done => setTimeout(done, 100))")
    assert page.run("document.querySelectorAll('main img, main a:not(nav a), main script, main [onload]').length") == 0
    names = page.run("[...document.querySelectorAll('#list-rows b')].map(node => node.textContent)")
    name = next(name for name in names if "onerror" in name)
    assert name == HOSTILE.replace("\u2028", "[U+2028]").replace("\u202e", "[U+202E]").replace("\u200b", "[U+200B]")
    assert page.run("document.querySelectorAll('script').length") == 2
    search(page, "<img")
    assert "q3" in shown_lists(page)


@pytest.mark.parametrize(("width", "dark"), WIDTHS)
def test_nothing_runs_out_of_the_page(page: Page, width: int, dark: bool):
    page.check_fits(width, dark)
