"use strict";
// Script of all pages: paging, search, and a hint at tables that scroll. Without it, a page shows all contents.

// Fills `container` with buttons for the pages of a list. `showPage` is called with the number of the new page.
function fillPager(container, numItems, pageSize, page, showPage) {
  const numPages = Math.max(1, Math.ceil(numItems / pageSize));
  const button = (label, targetPage, isEnabled) => {
    const node = document.createElement("button");
    Object.assign(node, { type: "button", disabled: !isEnabled, textContent: label });
    node.addEventListener("click", () => showPage(targetPage));
    return node;
  };
  const position = document.createElement("span");
  position.textContent = `${page + 1} of ${numPages}`;
  container.replaceChildren(
    button("Previous", page - 1, page > 0),
    position,
    button("Next", page + 1, page + 1 < numPages),
  );
  container.hidden = numPages === 1;
}

// Shows `pageSize` of the nodes at a time, and a pager after `list`. Returns a function that shows other nodes instead.
function makePaged(list, nodes, pageSize) {
  const container = document.createElement("div");
  container.className = "pages";
  list.after(container);

  let visibleNodes = [];
  function show(items, page) {
    for (const node of visibleNodes) node.classList.add("off-page");
    visibleNodes = items.slice(page * pageSize, (page + 1) * pageSize);
    for (const node of visibleNodes) node.classList.remove("off-page");
    fillPager(container, items.length, pageSize, page, (targetPage) => {
      show(items, targetPage);
      list.scrollIntoView({ block: "start" });
    });
  }

  for (const node of nodes) node.classList.add("off-page");
  show(nodes, 0);
  return (items) => show(items, 0);
}

// Long tables.
for (const table of document.querySelectorAll("table[data-paged]")) {
  const rows = [...table.tBodies[0].rows];
  const pageSize = Number(table.dataset.paged);
  if (rows.length > pageSize) makePaged(table.parentElement, rows, pageSize);
}

// Lists with a search box. An entry matches if its text contains all words.
for (const section of document.querySelectorAll(".searchable")) {
  const box = section.querySelector("input[type=search]");
  const list = section.querySelector(".list");
  const entries = [...list.children].map((node) => ({ node, text: node.textContent.toLowerCase() }));
  const nodes = entries.map((entry) => entry.node);
  const showEntries = makePaged(list, nodes, Number(list.dataset.paged));

  box.closest(".search").hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = entries.filter(({ text }) => words.every((word) => text.includes(word)));
    showEntries(matches.map((entry) => entry.node));
    section.querySelector("output").textContent = `${matches.length} found`;
  });
}

// Tables that are wider than the page.
const observer = new ResizeObserver((changes) => {
  for (const { target } of changes) {
    target.classList.toggle("wider", target.scrollWidth > target.clientWidth + 1);
  }
});
for (const node of document.querySelectorAll(".scroll")) observer.observe(node);
