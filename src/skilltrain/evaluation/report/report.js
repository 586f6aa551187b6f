"use strict";
// Filters the listed queries by their whole text. Without a script the page loses the search box and nothing else.
const entries = [...document.querySelectorAll(".query")].map((node) => ({ node, text: node.textContent.toLowerCase() }));
const box = document.getElementById("search");
const found = document.getElementById("found");

function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const section = document.querySelector("input[name=section]:checked").id.replace("show-", "");
  let count = 0;
  for (const { node, text } of entries) {
    node.hidden = !words.every((word) => text.includes(word));
    if (!node.hidden && (section === "all" || node.classList.contains(section))) count += 1;
  }
  found.textContent = `${count} shown`;
}

box.parentElement.hidden = entries.length === 0;
box.addEventListener("input", filter);
for (const button of document.querySelectorAll("input[name=section]")) button.addEventListener("change", filter);
filter();
