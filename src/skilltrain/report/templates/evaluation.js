// Filters the listed queries by their whole text, and shows a few at a time.
const QUERIES_A_PAGE = 25;
const box = document.getElementById("search");
const queryLists = [...document.querySelectorAll(".queries .list")].map((list) => {
  const entries = [...list.children].map((node) => ({ node, text: node.textContent.toLowerCase() }));
  return { entries, show: paged(list, entries.map((entry) => entry.node), QUERIES_A_PAGE) };
});

function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const { entries, show } of queryLists) {
    const kept = entries.filter(({ text }) => words.every((word) => text.includes(word)));
    show(kept.map((entry) => entry.node));
    count += kept.length;
  }
  document.getElementById("found").textContent = `${count} found`;
}

box.parentElement.hidden = queryLists.length === 0;
box.addEventListener("input", filter);
filter();
