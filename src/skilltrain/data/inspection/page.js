"use strict";
// Shows the page's data: dropped pairs and lists, filtered and a few at a time. Every text becomes a text node; nothing
// is ever parsed as HTML. Without this script the page loses these two parts and keeps all counts.
const data = JSON.parse(document.getElementById("data").textContent);
const skills = data.skills.map(([id, name, description, body, category, lang, source, chars, serves, flags]) => (
  { id, name, description, body, category, lang, source, chars, serves, flags }));
const POSITIVE = new Set(["required", "useful"]);
const LISTS_A_PAGE = 10, DROPS_A_PAGE = 5;
// Characters that nobody sees, bidirectional orders among them; joiners are left alone, for some scripts need them.
const UNSEEN = "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e"
  + "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]";

function element(tag, kind, ...content) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...content);
  return node;
}

// `text` in a new element: what nobody sees is written out, and what was searched for is marked.
function shown(tag, kind, text, words = []) {
  const node = element(tag, kind);
  node.dir = "auto";
  const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const pattern = new RegExp([UNSEEN, ...escaped].join("|"), "giu");
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    node.append(text.slice(end, match.index));
    const found = match[0];
    const unseen = new RegExp(`^${UNSEEN}$`, "u").test(found);
    const code = `[U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`;
    node.append(unseen ? element("span", "unseen", code) : element("mark", "hit", found));
    end = match.index + found.length;
  }
  node.append(text.slice(end));
  return node;
}

// Search. A word is looked for in every skill once; a list is found where its query or one of its skills holds each word.
let skillTexts = null, queryTexts = null;
const found = new Map();

function prepare() {
  if (skillTexts) return;
  skillTexts = skills.map((s) => [s.name, s.id, s.description, s.category, s.source, s.body, ...s.flags].join("\n").toLowerCase());
  queryTexts = data.lists.map(([id, query]) => `${id}\n${query}`.toLowerCase());
}

function skillsWith(word) {
  if (!found.has(word)) {
    prepare();
    if (found.size > 200) found.clear();
    const id = word.startsWith("skill:") ? word.slice(6) : null;
    found.set(word, skills.map((skill, place) => (id === null ? skillTexts[place].includes(word) : skill.id.toLowerCase() === id)));
  }
  return found.get(word);
}

// `skill:ID` is one word, whatever the id holds.
const wordsOf = (text) => (text.startsWith("skill:") ? [text.trim().toLowerCase()] : text.toLowerCase().split(/\s+/).filter(Boolean));
const toMark = (words) => words.filter((word) => !word.startsWith("skill:"));

function pager(place, total, size, page, go) {
  const pages = Math.max(1, Math.ceil(total / size));
  const button = (name, to, enabled) => {
    const node = element("button", "", name);
    node.type = "button";
    node.disabled = !enabled;
    node.addEventListener("click", () => go(to));
    return node;
  };
  place.replaceChildren(button("Previous", page - 1, page > 0), element("span", "", `${page + 1} of ${pages}`),
    button("Next", page + 1, page + 1 < pages));
  place.hidden = pages === 1;
}

function facts(skill) {
  const parts = [skill.category, skill.lang, skill.source, skill.chars < 0 ? "not in the pool" : `body of ${skill.chars.toLocaleString("en")} characters`,
    `negative of ${skill.serves.toLocaleString("en")} ${skill.serves === 1 ? "list" : "lists"}`];
  if (skill.flags.length) parts.push(`flagged: ${skill.flags.join(", ")}`);
  return parts.filter(Boolean).join(" · ");
}

function linkTo(id) {
  const node = element("button", "link");
  node.type = "button";
  node.dataset.skill = id;
  node.append(shown("bdi", "", id));
  return node;
}

// Lists.
const listBox = document.getElementById("list-search"), listCheck = document.getElementById("list-check");
const listRows = document.getElementById("list-rows");
let listPage = 0, listsFound = [];

function findLists() {
  const words = wordsOf(listBox.value), check = listCheck.value;
  const number = data.checks.findIndex(([key]) => key === check);
  if (words.length) prepare();
  const having = words.map(skillsWith);
  listsFound = [];
  data.lists.forEach(([, , entries, findings], place) => {
    if (check && !findings.some(([found]) => found === number)) return;
    if (words.every((word, w) => queryTexts[place].includes(word) || entries.some(([skill]) => having[w][skill]))) listsFound.push(place);
  });
  listPage = 0;
  showLists();
}

function showLists() {
  const words = wordsOf(listBox.value);
  const page = listsFound.slice(listPage * LISTS_A_PAGE, (listPage + 1) * LISTS_A_PAGE);
  listRows.replaceChildren(...page.map((place) => listArticle(data.lists[place], words)));
  document.getElementById("list-found").textContent = listsFound.length === data.lists.length
    ? `${listsFound.length.toLocaleString("en")} lists`
    : `${listsFound.length.toLocaleString("en")} of ${data.lists.length.toLocaleString("en")} lists`;
  pager(document.getElementById("list-pages"), listsFound.length, LISTS_A_PAGE, listPage, (to) => {
    listPage = to;
    showLists();
    document.getElementById("lists").scrollIntoView();
  });
}

function listArticle([id, query, entries, findings], words) {
  const asked = element("div", "asked", shown("h3", "", id), shown("p", "query", query || "(the query’s text was not found)", toMark(words)));
  const odd = new Set(findings.flatMap(([, places]) => places));
  if (findings.length) asked.append(element("ul", "findings", ...findings.map(([check]) => element("li", "", data.checks[check][1]))));
  const having = words.map(skillsWith);
  const rows = entries.map((entry, place) => {
    const node = entryRow(entry, toMark(words), words.length > 0 && having.some((has) => has[entry[0]]));
    if (odd.has(place)) node.classList.add("odd");
    return node;
  });
  return element("article", "list", asked, element("ol", "entries", ...rows));
}

function entryRow([skill, source, rank, verdict, score], words, hit) {
  const { name, description } = skills[skill];
  const from = element("span", "from");
  const swatch = element("i", `swatch ${colorOf(data.sources[source])}`);
  from.append(swatch, rank ? `${data.sources[source]} ${rank}` : data.sources[source]);
  from.title = rank ? `rank ${rank} of ${data.sources[source]}` : data.sources[source];
  const what = element("span", "what", shown("b", "", name || skills[skill].id, words), shown("span", "", description, words));
  what.dir = "auto";
  const said = score === undefined ? data.verdicts[verdict] : `${data.verdicts[verdict]}, ${score}`;
  const details = element("details", "", element("summary", "", from, what, element("span", "verdict", said)));
  details.addEventListener("toggle", () => details.open && details.children.length === 1 && details.append(skillMore(skill, words)));
  const row = element("li", POSITIVE.has(data.verdicts[verdict]) ? "positive" : "", details);
  if (hit) row.classList.add("hit");
  return row;
}

function skillMore(place, words) {
  const skill = skills[place];
  return element("div", "more", element("p", "facts", linkTo(skill.id)), element("p", "facts", facts(skill)),
    shown("p", "", skill.description, words), shown("pre", "", skill.body, words));
}

// A source has the colour that the tables above give it.
const colors = new Map([...document.querySelectorAll(".flow tbody th .swatch")].map((node) => [node.parentElement.textContent, node.classList[1]]));
const colorOf = (source) => colors.get(source) ?? (source === "gold" ? "pos" : "plain");

// Drops.
const dropBox = document.getElementById("drop-search"), dropRows = document.getElementById("drop-rows");
let dropPage = 0, dropsFound = [];
// Layers whose value is always the same, like that of equal names: it says nothing.
const constant = new Set(data.drops.map(([layer]) => layer).filter((layer) =>
  new Set(data.drops.filter(([of]) => of === layer).map(([, value]) => value)).size === 1));

function findDrops() {
  const layer = document.querySelector("input[name=layer]:checked").value, words = wordsOf(dropBox.value);
  const having = words.map(skillsWith);
  dropsFound = data.drops.filter(([of, , , id, query, candidate, gold]) => (!layer || of === layer) && words.every((word, w) =>
    `${id}\n${query}`.toLowerCase().includes(word) || having[w][candidate] || (gold >= 0 && having[w][gold])));
  dropPage = 0;
  showDrops();
}

function showDrops() {
  const words = toMark(wordsOf(dropBox.value));
  const page = dropsFound.slice(dropPage * DROPS_A_PAGE, (dropPage + 1) * DROPS_A_PAGE);
  dropRows.replaceChildren(...page.map((drop) => dropArticle(drop, words)));
  document.getElementById("drop-found").textContent = `${dropsFound.length.toLocaleString("en")} ${dropsFound.length === 1 ? "pair" : "pairs"}`;
  pager(document.getElementById("drop-pages"), dropsFound.length, DROPS_A_PAGE, dropPage, (to) => {
    dropPage = to;
    showDrops();
    document.getElementById("drops").scrollIntoView();
  });
}

function dropArticle([layer, value, sources, id, query, candidate, gold, reason, left, right], words) {
  const number = value === null || constant.has(layer) ? "" : ` ${Number(value.toFixed(3))}`;
  const small = element("small", "", `${sources.join(", ")} candidate of ${id}`);
  const title = element("h3", "", `${layer}${number} `, small);
  title.title = reason;
  const head = element("header", "", title, shown("p", "query", query, words));
  const sides = element("div", "sides", side("Dropped candidate", candidate, left, words));
  if (gold >= 0) sides.append(side("Gold skill", gold, right, words));
  const node = element("article", "drop", head, sides);
  node.dataset.layer = layer;
  return node;
}

function side(role, place, pieces, words) {
  const skill = skills[place];
  const body = element("pre", "");
  body.dir = "auto";
  body.tabIndex = 0;
  body.setAttribute("aria-label", `Body of ${skill.id}`);
  pieces.forEach((piece, number) => piece && body.append(number % 2 ? shown("mark", "", piece) : shown("span", "", piece)));
  return element("div", "", element("p", "role", role), shown("h4", "", skill.name, words), element("p", "facts", linkTo(skill.id)),
    element("p", "facts", facts(skill)), shown("p", "described", skill.description, words), body);
}

// What leads here from elsewhere on the page.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-skill], button[data-check]");
  if (!button) return;
  listBox.value = button.dataset.skill === undefined ? "" : `skill:${button.dataset.skill}`;
  listCheck.value = button.dataset.check ?? "";
  findLists();
  document.getElementById("lists").scrollIntoView();
  listBox.focus({ preventScroll: true });
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  document.getElementById("lists").scrollIntoView();
  listBox.focus({ preventScroll: true });
});
setTimeout(prepare, 300); // so that the first search finds all lower-cased
listBox.addEventListener("input", findLists);
listCheck.addEventListener("change", findLists);
for (const controls of document.querySelectorAll(".controls")) controls.hidden = false;
findLists();
if (dropBox) {
  for (const button of document.querySelectorAll("input[name=layer]")) button.addEventListener("change", findDrops);
  dropBox.addEventListener("input", findDrops);
  findDrops();
}
