// Filters the listed queries by their whole text and the switch, and shows a few at a time.
const QUERIES_A_PAGE = 25;
const box = document.getElementById("search");
const found = document.getElementById("found");
const queryLists = [...document.querySelectorAll(".queries .list")].map((list) => {
  const entries = [...list.children].map((node) => ({ node, text: node.textContent.toLowerCase() }));
  return { entries, show: paged(list, entries.map((entry) => entry.node), QUERIES_A_PAGE) };
});

function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const section = document.querySelector("input[name=section]:checked").id.replace("show-", "");
  let count = 0;
  for (const { entries, show } of queryLists) {
    const kept = entries.filter(({ node, text }) => (section === "all" || node.classList.contains(section)) && words.every((word) => text.includes(word)));
    show(kept.map((entry) => entry.node));
    count += kept.length;
  }
  found.textContent = `${count} found`;
}

box.parentElement.hidden = queryLists.length === 0;
box.addEventListener("input", filter);
for (const button of document.querySelectorAll("input[name=section]")) button.addEventListener("change", filter);
filter();
