// Filters the listed queries by their whole text, and shows a few at a time.
const QUERIES_A_PAGE = 25;
const box = document.getElementById("search");
const list = document.querySelector(".queries .list");
const entries = [...list.children].map((node) => ({ node, text: node.textContent.toLowerCase() }));
const show = paged(list, entries.map((entry) => entry.node), QUERIES_A_PAGE);

function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const kept = entries.filter(({ text }) => words.every((word) => text.includes(word)));
  show(kept.map((entry) => entry.node));
  document.getElementById("found").textContent = `${kept.length} found`;
}

box.parentElement.hidden = false;
box.addEventListener("input", filter);
filter();
