"use strict";
// What all pages share: rows a page at a time, search, and a hint where a table scrolls. Without it a page keeps all contents.
function pager(place, total, size, page, go) {
  const pages = Math.max(1, Math.ceil(total / size));
  const button = (name, to, enabled) => {
    const node = document.createElement("button");
    Object.assign(node, { type: "button", disabled: !enabled, textContent: name });
    node.addEventListener("click", () => go(to));
    return node;
  };
  const where = document.createElement("span");
  where.textContent = `${page + 1} of ${pages}`;
  place.replaceChildren(button("Previous", page - 1, page > 0), where, button("Next", page + 1, page + 1 < pages));
  place.hidden = pages === 1;
}

// Shows `size` of the nodes at a time, and a pager after `list`; returns a function that takes other nodes.
function paged(list, nodes, size) {
  const place = document.createElement("div");
  place.className = "pages";
  list.after(place);
  let shown = [];
  function show(of, page) {
    for (const node of shown) node.classList.add("off-page");
    shown = of.slice(page * size, (page + 1) * size);
    for (const node of shown) node.classList.remove("off-page");
    pager(place, of.length, size, page, (to) => {
      show(of, to);
      list.scrollIntoView({ block: "start" });
    });
  }
  for (const node of nodes) node.classList.add("off-page");
  show(nodes, 0);
  return (of) => show(of, 0);
}

for (const table of document.querySelectorAll("table[data-paged]")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length > table.dataset.paged) paged(table.parentElement, rows, Number(table.dataset.paged));
}

// Filters the entries of a list by their whole text.
for (const section of document.querySelectorAll(".searchable")) {
  const box = section.querySelector("input[type=search]"), list = section.querySelector(".list");
  const entries = [...list.children].map((node) => ({ node, text: node.textContent.toLowerCase() }));
  const show = paged(list, entries.map((entry) => entry.node), Number(list.dataset.paged));
  box.closest(".search").hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = entries.filter(({ text }) => words.every((word) => text.includes(word)));
    show(matches.map((entry) => entry.node));
    section.querySelector("output").textContent = `${matches.length} found`;
  });
}

const scrolls = new ResizeObserver((changes) => {
  for (const { target } of changes) target.classList.toggle("wider", target.scrollWidth > target.clientWidth + 1);
});
for (const node of document.querySelectorAll(".scroll")) scrolls.observe(node);
