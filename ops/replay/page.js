"use strict";
// Draws the samples of this page token by token. Every text comes from models and journals: it is only ever set as textContent.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const samples = [...document.querySelectorAll("details.sample")];
const shade = byId("shade"), both = byId("both"), legend = byId("legend");
const HUES = [212, 32, 140, 280, 350, 180, 60, 320];

function element(kind, classes, text) {
  const made = document.createElement(kind);
  made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= data.infinite) return value > 0 ? "∞" : "-∞";
  return String(Number(value.toPrecision(4)));
}

function textOf(id) {
  const text = data.texts[id];
  return text === undefined ? String(id) : text === "" ? "∅" : text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

function versionOf(detail, place) {
  const span = detail.spans.find(([, start, end]) => start <= place && place < end);
  return span ? span[0] : null;
}

function maskOf(detail, index) {
  for (const name of ["mask", "loss_mask"]) {
    if (name in detail.of_each_token) return detail.of_each_token[name][index];
  }
  return null;
}

function valueOf(detail, index, what) {
  if (what === "gap") return detail.gaps[index];
  if (what === "logprob") return detail.logprobs ? detail.logprobs[index] : null;
  if (what === "entropy") return detail.entropy ? detail.entropy[index] : null;
  if (what === "version") return versionOf(detail, detail.start + index);
  const noted = detail.of_each_token[what.slice(5)];
  return noted ? noted[index] : null;
}

const known = { versions: [], largest: {} };
const heat = (share) => `rgba(var(--heat), ${(0.06 + 0.6 * Math.min(1, Math.max(0, share))).toFixed(3)})`;
const hued = (version) => `hsla(${HUES[known.versions.indexOf(version) % HUES.length]}, 75%, 55%, 0.32)`;

function colour(value, what) {
  if (value === null || value === undefined) return "";
  if (what === "version") return hued(value);
  if (what === "gap") {
    const size = Math.abs(value), least = Math.max(data.limit, 1e-9);
    return size <= data.limit ? "" : heat(Math.log10(size / least) / Math.max(1, Math.log10(1 / least)));
  }
  if (what === "logprob") return heat(-value / 8);
  if (what === "entropy") return heat(value / 3);
  const most = known.largest[what] || 1;
  return value === 0 ? "" : value < 0 ? `rgba(70, 130, 230, ${(0.1 + (0.5 * -value) / most).toFixed(3)})` : heat(value / most);
}

function factsOf(detail, index) {
  const place = detail.start + index, id = detail.ids[index], other = detail.replayed[index];
  const told = [`token ${place}`, `id ${id}`];
  if (id in data.texts) told.push(JSON.stringify(data.texts[id]));
  if (other !== undefined) told.push(`replayed ${other}${other in data.texts ? " " + JSON.stringify(data.texts[other]) : ""}`);
  told.push(`version ${versionOf(detail, place) ?? "–"}`, `gap ${figure(detail.gaps[index])}`);
  if (detail.logprobs) told.push(`recorded logprob ${figure(detail.logprobs[index])}`);
  if (detail.entropy) told.push(`entropy at least ${figure(detail.entropy[index])}`);
  if (detail.legs.includes(place)) told.push("here a new request to an engine began");
  if (detail.in_place.includes(place)) told.push("here weights were switched in place");
  for (const [name, values] of Object.entries(detail.of_each_token)) told.push(`${name} ${figure(values[index])}`);
  return told.join(" · ");
}

function drawn(detail, index, paired, first) {
  const place = detail.start + index, other = detail.replayed[index], id = detail.ids[index];
  const named = id in data.texts ? "" : " id";
  let made;
  if (paired) {
    made = element("span", "token pair");
    made.append(element("span", "recorded" + named, textOf(id)));
    made.append(element("span", "replayed" + named, other === undefined ? "" : textOf(other)));
  } else {
    made = element("span", "token" + named, textOf(id));
  }
  if (other !== undefined) made.classList.add("other");
  if (place === first) made.classList.add("first");
  if (detail.legs.includes(place)) made.classList.add("leg");
  if (detail.in_place.includes(place)) made.classList.add("switch");
  if (maskOf(detail, index) === 0) made.classList.add("masked");
  made.dataset.index = index;
  made.tabIndex = -1;
  made.style.backgroundColor = colour(valueOf(detail, index, shade.value), shade.value);
  return made;
}

function tokens(detail, from, to, paired, first) {
  const box = element("div", "text");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "tokens; arrow keys go from one to the next");
  for (let index = Math.max(0, from); index < Math.min(to, detail.ids.length); index++) box.append(drawn(detail, index, paired, first));
  return box;
}

function draw(sample) {
  const detail = data.details[sample.dataset.place], place = sample.querySelector(".tokens");
  const first = detail.first, changed = Object.keys(detail.replayed).length > 0;
  const index = first ?? detail.start;
  const made = [];
  if (detail.prompt) {
    const prompt = element("div", "text prompt");
    for (const id of detail.prompt) prompt.append(element("span", "token" + (id in data.texts ? "" : " id"), textOf(id)));
    made.push(element("h3", "", "Prompt"), prompt);
  }
  if (changed) {
    made.push(element("h3", "", "Around the first difference: recorded above, replayed below where it is another token"));
    made.push(tokens(detail, index - detail.start - 24, index - detail.start + 48, true, first));
  }
  made.push(element("h3", "", "The sample, as it was recorded"), tokens(detail, 0, Infinity, both.checked, first));
  const facts = element("p", "facts", "Point at a token, or go there with the arrow keys.");
  facts.setAttribute("role", "status");
  place.replaceChildren(...made, facts);
}

function tell(event) {
  const token = event.target.closest?.(".token[data-index]"), sample = event.target.closest?.("details.sample");
  if (token && sample) sample.querySelector(".facts").textContent = factsOf(data.details[sample.dataset.place], Number(token.dataset.index));
}

function redraw() {
  for (const sample of samples) if (sample.open) draw(sample);
  const what = shade.value, items = [];
  if (what === "version") for (const version of known.versions.slice(0, 24)) items.push([hued(version), `version ${version}`]);
  if (what === "gap") for (const size of [1e-5, 1e-3, 1e-1, 1].filter((it) => it > data.limit)) items.push([colour(size, "gap"), figure(size)]);
  if (what === "logprob") for (const value of [-0.1, -2, -8]) items.push([colour(value, what), figure(value)]);
  if (what === "entropy") for (const value of [0.1, 1, 3]) items.push([colour(value, what), `${figure(value)} nats`]);
  legend.replaceChildren(...items.map(([back, name]) => {
    const made = element("span", "swatch", name);
    made.style.backgroundColor = back;
    return made;
  }));
}

function filter() {
  const state = byId("only").value, words = byId("with").value.toLowerCase();
  let matching = 0;
  for (const row of document.querySelectorAll("#list tbody tr")) {
    row.hidden = (state && row.dataset.state !== state) || !row.textContent.toLowerCase().includes(words);
    matching += row.hidden ? 0 : 1;
  }
  byId("matching").textContent = state || words ? `${matching} match` : "";
}

function open(sample) {
  if (!sample) return;
  sample.open = true;
  sample.scrollIntoView();
  sample.querySelector("summary").focus({ preventScroll: true });
}

function step(by) {
  const now = samples.findIndex((sample) => sample.contains(document.activeElement));
  open(samples[Math.min(samples.length - 1, Math.max(0, now + by))]);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
  const token = document.activeElement.closest?.(".text");
  if (token && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
    const here = document.activeElement.classList.contains("token") ? document.activeElement : null;
    const next = !here ? token.firstElementChild : event.key === "ArrowRight" ? here.nextElementSibling : here.previousElementSibling;
    next?.focus();
  } else if (event.key === "n" || event.key === "p") step(event.key === "n" ? 1 : -1);
  else if (event.key === "s") { shade.selectedIndex = (shade.selectedIndex + 1) % shade.options.length; redraw(); }
  else if (event.key === "b") { both.checked = !both.checked; redraw(); }
  else return;
  event.preventDefault();
}

for (const detail of data.details) {
  if (!detail) continue;
  for (const [version] of detail.spans) if (!known.versions.includes(version)) known.versions.push(version);
  for (const [name, values] of Object.entries(detail.of_each_token)) {
    const most = values.reduce((a, b) => Math.max(a, Math.abs(b ?? 0)), 0), option = `note:${name}`;
    if (!(option in known.largest)) {
      const made = element("option", "", `note: ${name}`);
      made.value = option;
      shade.append(made);
    }
    known.largest[option] = Math.max(known.largest[option] ?? 0, most);
  }
}
known.versions.sort((a, b) => a - b);
for (const sample of samples) sample.addEventListener("toggle", () => { if (sample.open) draw(sample); });
for (const kind of ["mouseover", "focusin", "click"]) document.addEventListener(kind, tell);
for (const control of [shade, both]) control.addEventListener("change", redraw);
for (const control of [byId("only"), byId("with")]) control.addEventListener("input", filter);
document.addEventListener("keydown", onKey);
const follow = () => { const at = byId(decodeURIComponent(location.hash.slice(1))); if (at?.matches("details.sample")) open(at); };
addEventListener("hashchange", follow);
redraw();
follow();
