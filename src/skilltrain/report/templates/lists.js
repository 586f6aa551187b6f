// Shows the page's data: dropped pairs and lists, filtered and a few at a time. Every text becomes a text node; nothing
// is ever parsed as HTML. Without this script the page loses these two parts and keeps all counts.
const data = JSON.parse(document.getElementById("data").textContent);
const { skills } = data;
const POSITIVE = new Set(["required", "useful"]);
const LISTS_A_PAGE = 10, DROPS_A_PAGE = 5;
const UNSEEN = "\\[U\\+[0-9A-F]{4,6}\\]"; // how the page writes a character that nobody sees
const byId = (id) => document.getElementById(id);
const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function element(tag, kind, ...content) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...content);
  return node;
}

// `text` in a new element; what nobody sees stands out, and what was searched for is marked.
function shown(tag, kind, text, words = []) {
  const node = element(tag, kind);
  node.dir = "auto";
  const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const pattern = new RegExp([UNSEEN, ...escaped].join("|"), "giu");
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    const unseen = new RegExp(`^${UNSEEN}$`, "u").test(match[0]);
    node.append(text.slice(end, match.index), element(unseen ? "span" : "mark", unseen ? "unseen" : "hit", match[0]));
    end = match.index + match[0].length;
  }
  node.append(text.slice(end));
  return node;
}

// Search: a list is found where its query or one of its skills holds each word.
const skillWords = skills.map((s) => [s.name, s.id, s.description, s.category, s.source, s.body, ...s.flags].join("\n").toLowerCase());
const queryWords = data.lists.map(({ id, query }) => `${id}\n${query}`.toLowerCase());

function skillsWith(word) {
  const id = word.startsWith("skill:") ? word.slice(6) : null;
  return skills.map((skill, place) => (id === null ? skillWords[place].includes(word) : skill.id.toLowerCase() === id));
}

// `skill:ID` is one word, whatever the id holds.
const wordsOf = (text) => (text.startsWith("skill:") ? [text.trim().toLowerCase()] : text.toLowerCase().split(/\s+/).filter(Boolean));
const toMark = (words) => words.filter((word) => !word.startsWith("skill:"));

function facts(skill) {
  const parts = [skill.category, skill.lang, skill.source, skill.chars < 0 ? "not in the pool" : `body of ${many(skill.chars, "character")}`,
    `negative of ${many(skill.serves, "list")}`];
  if (skill.flags.length) parts.push(`flagged: ${skill.flags.join(", ")}`);
  return parts.filter(Boolean).join(" · ");
}

function linkTo(id) {
  const node = element("button", "link", shown("bdi", "", id));
  node.type = "button";
  node.dataset.skill = id;
  return node;
}

// Lists.
const listBox = byId("list-search"), listCheck = byId("list-check");
const titles = Object.fromEntries([...listCheck.options].map((option) => [option.value, option.textContent]));

function findLists() {
  const words = wordsOf(listBox.value), check = data.checks.indexOf(listCheck.value);
  const having = words.map(skillsWith);
  const places = [...data.lists.keys()].filter((place) => {
    const { entries, findings } = data.lists[place];
    if (listCheck.value && !findings.some(([key]) => key === check)) return false;
    return words.every((word, w) => queryWords[place].includes(word) || entries.some(([skill]) => having[w][skill]));
  });
  const every = data.lists.length;
  byId("list-found").textContent = places.length === every ? many(every, "list") : `${places.length.toLocaleString("en")} of ${many(every, "list")}`;
  showPage("list", places.map((place) => data.lists[place]), LISTS_A_PAGE, 0, (list) => listArticle(list, toMark(words)));
}

function showPage(name, items, size, page, article) {
  byId(`${name}-rows`).replaceChildren(...items.slice(page * size, (page + 1) * size).map(article));
  pager(byId(`${name}-pages`), items.length, size, page, (to) => {
    showPage(name, items, size, to, article);
    byId(`${name}s`).scrollIntoView();
  });
}

function listArticle({ id, query, entries, findings }, words) {
  const asked = element("div", "asked", shown("h3", "", id), shown("p", "query", query || "(the query’s text was not found)", words));
  const odd = new Set(findings.flatMap(([, places]) => places));
  if (findings.length) asked.append(element("ul", "findings", ...findings.map(([check]) => element("li", "", titles[data.checks[check]]))));
  const rows = entries.map((entry, place) => {
    const node = entryRow(entry, words);
    if (odd.has(place)) node.classList.add("odd");
    return node;
  });
  return element("article", "list", asked, element("ol", "entries", ...rows));
}

function entryRow([skill, source, rank, verdict, score], words) {
  const { id, name, description } = skills[skill];
  const origin = data.sources[source], said = data.verdicts[verdict];
  const from = element("span", "from", element("i", `swatch ${colorOf(origin)}`), rank ? `${origin} ${rank}` : origin);
  from.title = rank ? `rank ${rank} of ${origin}` : origin;
  const what = element("span", "what", shown("b", "", name || id, words), shown("span", "", description, words));
  what.dir = "auto";
  const verdictText = element("span", "verdict", score === undefined ? said : `${said}, ${score}`);
  const details = element("details", "", element("summary", "", from, what, verdictText));
  details.addEventListener("toggle", () => details.open && details.children.length === 1 && details.append(element("div", "more", ...skillTexts(skill, words))));
  return element("li", POSITIVE.has(said) ? "positive" : "", details);
}

function skillTexts(place, words) {
  const skill = skills[place], body = shown("pre", "", skill.body, words);
  body.tabIndex = 0;
  body.setAttribute("aria-label", `Body of ${skill.id}`);
  return [element("p", "facts", linkTo(skill.id)), element("p", "facts", facts(skill)), shown("p", "described", skill.description, words), body];
}

// A source has the colour that the tables above give it.
const colors = new Map([...document.querySelectorAll(".flow tbody th .swatch")].map((node) => [node.parentElement.textContent, node.classList[1]]));
const colorOf = (source) => colors.get(source) ?? (source === "gold" ? "pos" : "plain");

// Drops.
const dropBox = byId("drop-search");
// Filters whose value is always the same, like that of equal names: it says nothing.
const constant = new Set(data.drops.map((drop) => drop.filter).filter((name) =>
  new Set(data.drops.filter((drop) => drop.filter === name).map((drop) => drop.value)).size === 1));

function findDrops() {
  const name = document.querySelector("input[name=filter]:checked").value, words = wordsOf(dropBox.value);
  const having = words.map(skillsWith);
  const drops = data.drops.filter((drop) => (!name || drop.filter === name) && words.every((word, w) =>
    `${drop.id}\n${drop.query}`.toLowerCase().includes(word) || drop.skills.some((skill) => having[w][skill])));
  byId("drop-found").textContent = many(drops.length, "pair");
  showPage("drop", drops, DROPS_A_PAGE, 0, (drop) => dropArticle(drop, toMark(words)));
}

function dropArticle({ filter, value, sources, id, query, reason, skills: places }, words) {
  const number = value === null || constant.has(filter) ? "" : ` ${Number(value.toFixed(3))}`;
  const title = element("h3", "", `${filter}${number} `, element("small", "", `${sources.join(", ")} candidate of ${id}`));
  title.title = reason;
  const sides = places.map((place, n) => {
    const role = element("p", "facts", ["Dropped candidate", "Gold skill"][n]);
    return element("div", "", role, shown("h4", "", skills[place].name, words), ...skillTexts(place, words));
  });
  const node = element("article", "drop", element("header", "", title, shown("p", "query", query, words)), element("div", "sides", ...sides));
  node.dataset.filter = filter;
  return node;
}

// What leads here from elsewhere on the page.
function goToLists() {
  byId("lists").scrollIntoView();
  listBox.focus({ preventScroll: true });
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-skill], button[data-check]");
  if (!button) return;
  listBox.value = button.dataset.skill === undefined ? "" : `skill:${button.dataset.skill}`;
  listCheck.value = button.dataset.check ?? "";
  findLists();
  goToLists();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  goToLists();
});
listBox.addEventListener("input", findLists);
listCheck.addEventListener("change", findLists);
for (const controls of document.querySelectorAll(".controls")) controls.hidden = false;
findLists();
if (dropBox) {
  for (const button of document.querySelectorAll("input[name=filter]")) button.addEventListener("change", findDrops);
  dropBox.addEventListener("input", findDrops);
  findDrops();
}
