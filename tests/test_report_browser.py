"""The report in a real browser: two widths, both colour schemes, and the search."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headless_chromium import CHROMIUM, Page, browser
from invented_report import invented
from skilltrain.report.write import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

LOOKS = [(1280, False), (390, True), (390, False), (1280, True)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser that shows the report of invented systems with hostile names and texts."""
    root = tmp_path_factory.mktemp("browser")
    write_report(invented(24, hostile=True), root)
    with browser(root / "profile") as tab:
        tab.open(root / "report.html")
        yield tab


@pytest.fixture(autouse=True)
def quiet(page: Page) -> Iterator[None]:
    """Whatever a test does, nothing is logged, no dialog opens and nothing but the page itself is asked for."""
    yield
    page.check_quiet()
    assert set(page.requests) == {page.run("location.href")}


def shown(page: Page, selector: str) -> list[str]:
    """The texts of the elements that take room on the page."""
    return page.run(
        f"[...document.querySelectorAll({selector!r})].filter(node => node.getClientRects().length)"
        ".map(node => node.textContent)"
    )


def search(page: Page, words: str) -> str:
    """Type into the search box; what the page says then."""
    page.run(f"box.value = {words!r}; box.dispatchEvent(new Event('input'))")
    return page.run("document.getElementById('found').textContent")


def test_search_finds_texts_and_names_and_leaves_the_rest(page: Page):
    every = shown(page, ".query")
    assert search(page, "") == f"{len(every)} found"
    some = [entry for entry in every if "task-00" in entry]
    assert search(page, "TASK-00") == f"{len(some)} found"
    assert shown(page, ".query") == some
    assert search(page, ".*[(") == "0 found"
    assert search(page, "<img") == f"{len(every)} found"  # the hostile text, as text
    search(page, "")


def test_lists_open_and_hostile_texts_stay_texts(page: Page):
    page.run("document.querySelectorAll('details').forEach(node => node.open = true)")
    assert page.run("document.querySelectorAll('main img, main script, main [onerror]').length") == 0
    assert any("[U+202E]evil[U+2066][U+200B]" in words for words in shown(page, ".query .text"))
    assert shown(page, ".cases li")
    assert page.run("document.documentElement.scrollWidth") <= 1280
    page.run("document.querySelectorAll('details').forEach(node => node.open = false)")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_nothing_runs_out_of_the_page_and_everything_has_a_name(page: Page, width: int, dark: bool):
    page.check_fits(width, dark)
    spilled = "[...document.querySelectorAll('figure svg text')].map(node => node.getBoundingClientRect())"
    assert page.run(f"{spilled}.filter(box => box.left < 0 || box.right > innerWidth).length") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out_from_their_ground(page: Page, dark: bool):
    page.open(Path(page.run("decodeURIComponent(location.pathname)")), 1280, dark)
    assert page.run(CONTRASTS) == []


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
