// The ribbon: a lane for each worker over time, coloured by the version that it served; what the page alone can draw.
import { drawGuide, drawTimes, timeTicks } from "./chart.js";
import { byId, clock, count, el, isKnown, lasting, put, visible } from "./dom.js";
import { drawGlyph, glyphs } from "./glyphs.js";
import { list } from "./rollouts.js";
import { fitted, inkOn, shortened, theme, versionColour } from "./palette.js";
import { windowOf } from "./state.js";
import { byName, wanted } from "./workers.js";

const MANY = 64, MOST_HIGH = 440, AXIS = 22, FLEET = 56, PUBLISHES = 28;
const TROUBLE = new Set(["stall", "death", "fault"]);

const ribbon = { state: null, rows: [], total: 0, left: 90, from: 0, to: 1, chosen: null, event: null, hover: null, mark: null };

const troubled = (id) => ribbon.state.workers[id]?.alive === false || ribbon.state.lanes[id]?.ticks.some((it) => TROUBLE.has(it[1]));

// Lanes in order, by host where there are many; y and height of each.
function layOut() {
  const { state } = ribbon, fits = wanted(state.workers), only = byId("workers-trouble").checked;
  const host = (id) => state.workers[id]?.host ?? "";
  ribbon.all = [...new Set([...Object.keys(state.workers), ...Object.keys(state.lanes)])];
  const shown = ribbon.all.filter((id) => fits(id) && (!only || troubled(id))), many = shown.length > MANY;
  shown.sort((a, b) => (many ? byName(host(a), host(b)) : 0) || byName(a, b));
  const high = shown.length <= 16 ? 22 : many ? 6 : 14;  // fewer lanes are higher
  let y = 0, last = null, labelled = -Infinity;
  ribbon.rows = shown.map((id) => {
    const begins = many && host(id) !== last;
    if (begins && last !== null) y += 3;
    last = host(id);
    const label = !many ? id : begins && y - labelled >= 12 ? last : "";
    if (label) labelled = y;
    y += high;
    return { id, label, y: y - high, high };
  });
  ribbon.total = y;
}

const shareOf = (at) => (Math.min(ribbon.to, Math.max(ribbon.from, at)) - ribbon.from) / (ribbon.to - ribbon.from || 1);
const xOf = (at) => ribbon.left + shareOf(at) * (ribbon.right - ribbon.left);
const atOf = (x) => ribbon.from + ((x - ribbon.left) / (ribbon.right - ribbon.left)) * (ribbon.to - ribbon.from);
const laneOf = (id) => ribbon.state.lanes[id] ?? { spans: [], ticks: [] };

function drawSpan(pen, [t0, t1, version, state], y, high) {
  const from = xOf(t0), to = Math.max(from + 1, xOf(t1 ?? ribbon.to)), { bad } = theme();
  const colour = versionColour(version), top = y + (high > 8 ? 2 : 0.5), tall = high - (high > 8 ? 4 : 1);
  if (state === "dead") {
    pen.fillStyle = bad;
    pen.fillRect(from, y + high / 2 - 0.75, to - from, 1.5);
    return;
  }
  const serving = state === "serving";  // else half as high
  pen.globalAlpha = serving ? 1 : 0.4;
  pen.fillStyle = colour;
  pen.fillRect(from, serving ? top : top + tall / 4, to - from - (to - from > 3 ? 0.75 : 0), serving ? tall : tall / 2);
  pen.globalAlpha = 1;
  if (high < 14 || to - from < 48) return;
  const text = serving ? (Number.isInteger(version) ? `v${version}` : "") : high >= 20 ? state : "";
  if (!text || pen.measureText(text).width > to - from - 20) return;
  pen.fillStyle = serving ? inkOn(colour) : theme().text;
  pen.textAlign = "left";
  pen.fillText(text, from + (serving ? 12 : 5), y + high / 2 + 0.5);
}

function drawLane(pen, row) {
  const { spans, ticks } = laneOf(row.id), worker = ribbon.state.workers[row.id], { text, weak, bad, line } = theme();
  if (row.id === ribbon.chosen) {
    pen.fillStyle = line;
    pen.fillRect(0, row.y, ribbon.right, row.high);
  }
  pen.textAlign = "left";
  pen.fillStyle = row.label !== row.id || !worker ? weak : worker.alive === false ? bad : text;
  if (row.label) pen.fillText(shortened(pen, visible(row.label), ribbon.left - 12), 2, row.y + Math.max(12, row.high) / 2 + 0.5);
  for (const span of spans) {
    if ((span[1] ?? ribbon.to) >= ribbon.from && span[0] <= ribbon.to) drawSpan(pen, span, row.y, row.high);
  }
  for (const [at, kind] of ticks) {
    if (at >= ribbon.from && at <= ribbon.to) drawGlyph(pen, kind, xOf(at), row.y + row.high / 2, row.high);
  }
}

// How many workers served which version: all lanes at once, over the lanes.
function drawFleet(pen, top) {
  const ids = ribbon.rows.map((row) => row.id);
  const wide = Math.max(1, Math.floor((ribbon.right - ribbon.left) / 3)), counts = new Map(), { weak } = theme();
  const column = (at) => Math.round(shareOf(at) * wide);
  for (const id of ids) {
    for (const [t0, t1, version, state] of ribbon.state.lanes[id]?.spans ?? []) {
      if (state !== "serving" || (t1 ?? ribbon.to) < ribbon.from) continue;
      if (!counts.has(version)) counts.set(version, new Int32Array(wide + 1));
      counts.get(version)[column(t0)] += 1;
      counts.get(version)[column(t1 ?? ribbon.to)] -= 1;
    }
  }
  const base = new Float32Array(wide + 1), high = FLEET - 8;
  for (const version of [...counts.keys()].sort((a, b) => (a ?? -1) - (b ?? -1))) {
    pen.fillStyle = versionColour(version);
    let here = 0;
    const steps = counts.get(version);
    for (let place = 0; place < wide; place++) {
      here += steps[place];
      if (!here) continue;
      const tall = (here / Math.max(1, ids.length)) * high;
      pen.fillRect(ribbon.left + place * 3, top + high - base[place] - tall, 3, tall);
      base[place] += tall;
    }
  }
  pen.fillStyle = weak;
  pen.textAlign = "left";
  pen.fillText("serving", 2, top + high / 2 - 6);
  pen.fillText(`of ${count(ids.length)}`, 2, top + high / 2 + 7);
}

function drawPublishes() {
  const canvas = byId("publishes"), fleet = ribbon.rows.length > MANY;
  canvas.style.height = `${PUBLISHES + (fleet ? FLEET : 2)}px`;
  const pen = fitted(canvas), { text, weak, bad, line } = theme();
  pen.fillStyle = weak;
  pen.textAlign = "left";
  pen.fillText("published", 2, PUBLISHES - 10);
  pen.fillStyle = line;
  pen.fillRect(ribbon.left, PUBLISHES - 1, ribbon.right - ribbon.left, 1);
  if (fleet) drawFleet(pen, PUBLISHES + 2);
  let free = -Infinity;
  for (const [at, version, outcome] of [...ribbon.state.publishes].sort((a, b) => a[0] - b[0])) {
    if (at < ribbon.from || at > ribbon.to) continue;
    const x = xOf(at), failed = outcome !== "ok", label = failed ? `✕ v${version}` : `v${version}`;
    const half = pen.measureText(label).width / 2;
    pen.fillStyle = failed ? bad : versionColour(version);
    pen.fillRect(Math.round(x) - 1, PUBLISHES - 10, 2, 10);
    const middle = Math.min(ribbon.right - half, Math.max(ribbon.left + half, x));
    if (middle - half < free) continue;
    pen.fillStyle = failed ? bad : text;
    pen.textAlign = "center";
    pen.fillText(label, middle, 9);
    free = middle + half + 6;
  }
}

// Draw what is in sight.
function drawRibbon() {
  const { state } = ribbon, box = byId("lanes"), canvas = byId("ribbon");
  if (!state || !box.clientWidth) return;
  const bottom = Math.max(12, Math.min(ribbon.total, MOST_HIGH)), down = box.scrollTop;
  for (const node of [box, canvas]) node.style.height = `${bottom + AXIS}px`;
  byId("lanes-room").style.height = `${ribbon.total + AXIS}px`;
  const wide = canvas.clientWidth, pen = fitted(canvas, wide, bottom + AXIS);
  const widest = Math.max(0, ...ribbon.rows.slice(0, 200).map((row) => pen.measureText(row.label).width));
  ribbon.left = Math.ceil(Math.min(Math.max(64, widest + 14), wide * 0.28, 200));
  ribbon.right = wide - 6;
  [ribbon.from, ribbon.to] = windowOf(state);
  pen.save();
  pen.beginPath();
  pen.rect(0, 0, wide, bottom);
  pen.clip();
  pen.translate(0, -down);
  for (const row of ribbon.rows) if (row.y + row.high >= down && row.y <= down + bottom) drawLane(pen, row);
  pen.restore();
  drawTimes(pen, timeTicks(ribbon.from, ribbon.to, ribbon.right - ribbon.left), xOf, ribbon.left, ribbon.right, bottom, bottom);
  for (const [at, dashed] of [[ribbon.mark, true], [ribbon.hover, false]]) {
    if (isKnown(at) && at >= ribbon.from && at <= ribbon.to) drawGuide(pen, xOf(at), dashed, 0, bottom);
  }
  drawPublishes();
}

const versionText = (version, unknown) => (Number.isInteger(version) ? `version ${version}` : unknown);
function spanText([t0, t1, version, state]) {
  const until = isKnown(t1) ? clock(t1) : "now";
  return `${versionText(version, "version unknown")}, ${state}, ${clock(t0)} to ${until} (${lasting((t1 ?? ribbon.to) - t0)})`;
}
const tickText = ([t, kind, version, text]) =>
  [`${clock(t)} ${glyphs[kind]?.told ?? kind}`, versionText(version, ""), text].filter(Boolean).join(", ");

// All that happened in a lane, in order: [time, text].
function story(id) {
  const { spans, ticks } = laneOf(id);
  const told = [...spans.map((it) => [it[0], spanText(it)]), ...ticks.map((it) => [it[0], tickText(it)])];
  return told.sort((a, b) => a[0] - b[0]);
}

function say(text) {
  put(byId("ribbon-facts"), text || "Point at a lane, or go there with the arrow keys: what happened, and when. A click, or Enter, lists its rollouts.");
}

function point(event) {
  const y = event.offsetY + byId("lanes").scrollTop;
  const row = ribbon.rows.find((it) => it.y <= y && y < it.y + it.high);
  event.target.style.cursor = row ? "pointer" : "";
  ribbon.known = ribbon.chosen === row?.id;
  ribbon.hover = event.offsetX >= ribbon.left ? atOf(event.offsetX) : null;
  ribbon.chosen = row?.id ?? null;
  if (row) {
    const { spans, ticks } = laneOf(row.id), at = ribbon.hover ?? ribbon.to;
    const near = ticks.filter((it) => Math.abs(xOf(it[0]) - xOf(at)) <= 6).map(tickText);
    const span = spans.findLast((it) => it[0] <= at && at <= (it[1] ?? ribbon.to));
    say([`${row.id}: ${span ? spanText(span) : "nothing known"}`, ...near].join(" · "));
  } else say(ribbon.hover === null ? "" : clock(ribbon.hover));
  drawRibbon();
}

const DOWN = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 };
const ALONG = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

function onKey(event) {
  const lanes = ribbon.rows, here = lanes.findIndex((row) => row.id === ribbon.chosen);
  if (event.key === "Enter" && ribbon.chosen !== null) list({ worker: ribbon.chosen });
  const down = DOWN[event.key], along = ALONG[event.key];
  if (!lanes.length || (down === undefined && along === undefined)) return;
  event.preventDefault();
  const row = lanes[Math.min(lanes.length - 1, Math.max(0, here < 0 ? 0 : here + (down ?? 0)))];
  const told = story(row.id);
  const start = ribbon.chosen === row.id && ribbon.event !== null ? ribbon.event : told.length - 1;
  ribbon.event = Math.min(told.length - 1, Math.max(0, down !== undefined ? told.length - 1 : start + along));
  ribbon.chosen = row.id;
  ribbon.hover = told[ribbon.event]?.[0] ?? null;
  say(`${row.id}: ${told[ribbon.event]?.[1] ?? "nothing known"}`);
  const box = byId("lanes"), inside = box.clientHeight - AXIS;
  if (row.y < box.scrollTop) box.scrollTop = row.y;
  else if (row.y + row.high > box.scrollTop + inside) box.scrollTop = row.y + row.high - inside;
  drawRibbon();
}

// The versions that are served now, newest first, each with its colour.
function showVersions(state) {
  const counts = new Map();
  for (const { alive, version = null } of Object.values(state.workers)) {
    if (alive !== false) counts.set(version, (counts.get(version) ?? 0) + 1);
  }
  const found = [...counts].sort((a, b) => (b[0] ?? -1) - (a[0] ?? -1));
  const made = found.slice(0, 8).map(([version, number]) => {
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = versionColour(version);
    const name = version === null ? "no version" : `v${version}`;
    return el("span", { class: "key", role: "listitem" }, swatch, `${name}: ${count(number)}`);
  });
  if (found.length > 8) made.push(el("span", { class: "weak", role: "listitem" }, `and ${found.length - 8} more`));
  byId("versions").replaceChildren(...made);
}

export function showRibbon(state, changed, at = null) {
  ribbon.state = state;
  ribbon.mark = state.mode === "journal" ? at : null;
  if (!changed || changed.has("workers")) showVersions(state);
  // Lanes are laid out anew only where others are to be seen: sorting a thousand names is what costs.
  const filter = byId("workers-filter").value, only = byId("workers-trouble").checked;
  const lanes = [filter, only, ...Object.keys(state.lanes), ...Object.keys(state.workers)].join("\n");
  if (!changed || filter || only || lanes !== ribbon.lanes) {
    ribbon.lanes = lanes;
    layOut();
    const hidden = ribbon.all.length - ribbon.rows.length;
    const told = `${count(ribbon.rows.length)} lanes${hidden ? `, ${count(hidden)} filtered out` : ""}`;
    put(byId("workers-told"), `${told} · ${state.mode === "journal" ? "whole run" : "last 15 min"}`);
  }
  drawRibbon();
}

export function startRibbon() {
  const canvas = byId("ribbon");
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  // A finger's first tap says what a lane is, the second one lists its rollouts; lifting it does not count as leaving.
  canvas.addEventListener("click", () => { if (ribbon.known && ribbon.chosen !== null) list({ worker: ribbon.chosen }); });
  const leave = (event) => {
    if (event.pointerType === "touch") return;
    ribbon.hover = ribbon.chosen = ribbon.event = null;
    say("");
    drawRibbon();
  };
  for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, leave);
  canvas.addEventListener("keydown", onKey);
  byId("lanes").addEventListener("scroll", drawRibbon, { passive: true });
  new ResizeObserver(drawRibbon).observe(byId("lanes"));
  say("");
}
