// Elements, figures and times. Every text may come from a stranger: it is only ever set as text.
export const byId = (id) => document.getElementById(id);

// Characters that cannot be seen, or that change how others look, are shown by their number.
export const visible = (text) =>
  String(text).replace(/[^\P{C}\n\t]|\p{Zl}|\p{Zp}/gu, (one) => `⟨U+${hex(one.codePointAt(0))}⟩`);
const hex = (code) => code.toString(16).toUpperCase().padStart(4, "0");

// Without a prototype: `__proto__` is a name like others.
export const bare = (given) => Object.assign(Object.create(null), given);

// An element. `given`: attributes, and listeners by their event's name. Children are elements and texts.
export function el(kind, given = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(given)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (isKnown(value) && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) if (isKnown(child)) made.append(child instanceof Node ? child : visible(child));
  return made;
}

// Set a text only if it is another one: a screen reader says what changes.
export function put(node, text) {
  const shown = visible(text ?? "");
  if (node.textContent !== shown) node.textContent = shown;
}

// Children of `parent` for `items`, kept by key, so that focus and open details survive an update.
const kept = new WeakMap();
export function keyed(parent, items, keyOf, make, update) {
  const old = kept.get(parent) ?? new Map(), now = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (now.has(key)) continue;
    const node = old.get(key) ?? make(item);
    update(node, item);
    now.set(key, node);
    if (node === place) place = node.nextSibling;
    else parent.insertBefore(node, place);
  }
  for (const [key, node] of old) if (!now.has(key)) node.remove();
  kept.set(parent, now);
}

// Names and what they are.
export function definitions(given) {
  const parts = given.flatMap(([name, text]) => [el("dt", { class: "text" }, name), el("dd", { class: "text" }, text)]);
  return el("dl", { class: "facts-list" }, ...parts);
}

// Items of a list that have an id, or a line that says that there are none.
export function keyedOrNone(parent, items, none, make, update) {
  const makes = (it) => (it ? make(it) : el("li", { class: "weak" }, none));
  keyed(parent, items.length ? items : [null], (it) => it?.id, makes, (node, it) => { if (it) update(node, it); });
}

export const isKnown = (value) => value !== null && value !== undefined;
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : "–");
export const figure = (value, digits = 3) => (isNumber(value) ? String(Number(value.toPrecision(digits))).replace("-", "−") : "–");
export const percent = (share) => (isNumber(share) ? `${figure(100 * share, share < 0.1 ? 2 : 3)} %` : "–");

// 14.2k, 3.1M
export function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  for (const [least, unit, name] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (size >= least) return figure(value / unit) + name;
  }
  return size >= 100 || Number.isInteger(value) ? count(value) : figure(value);
}

// A duration: 340 ms, 1.2 s, 2 min 5 s, 3 h 12 min
export function lasting(seconds) {
  if (!isNumber(seconds)) return "–";
  const whole = Math.round(Math.abs(seconds));
  if (seconds && Math.abs(seconds) < 1) return `${figure(Math.abs(seconds) * 1000, seconds < 0.1 ? 2 : 3)} ms`;
  if (seconds < 10) return `${figure(seconds, 2)} s`;
  for (const [size, unit, part, name] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    const parts = Math.floor((whole % size) / part);
    if (whole >= size) return `${Math.floor(whole / size)} ${unit}${parts ? ` ${parts} ${name}` : ""}`;
  }
  return `${whole} s`;
}

const two = (number) => String(number).padStart(2, "0");
export function clock(at, withSeconds = true) {
  const it = new Date(at * 1000);
  if (!isNumber(at) || Number.isNaN(it.getTime())) return "–";
  return `${two(it.getHours())}:${two(it.getMinutes())}${withSeconds ? ":" + two(it.getSeconds()) : ""}`;
}
export function day(at) {
  const it = new Date(at * 1000);
  return Number.isNaN(it.getTime()) ? "–" : `${it.getFullYear()}-${two(it.getMonth() + 1)}-${two(it.getDate())}`;
}
// The time, with its day where that is not the day of `now`.
export const moment = (at, now) => (isNumber(at) ? (day(at) === day(now) ? "" : day(at) + " ") + clock(at) : "–");
export const since = (at, now) => (isNumber(at) ? `since ${moment(at, now)} (${lasting(Math.max(0, now - at))})` : "");
