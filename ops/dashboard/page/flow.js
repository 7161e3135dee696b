// How work flows: charts over time and by version, with the figures of now beside them.
import { Chart } from "./chart.js";
import { byId, count, el, figure, isKnown, keyed, lasting, percent, put, short } from "./dom.js";
import { windowOf } from "./state.js";

const charts = {};
const AGES = ["high", "normal", "low"];
const BANDS = ["consumed", "done, not consumed", "running", "queued"];

export function startFlow() {
  const colours = ["#0072b2", "#56b4e9", "#009e73", "#e69f00"];
  charts.flow = new Chart("Cumulative flow", { names: BANDS, colours, kind: "band", format: short });
  charts.age = new Chart("Age of the queue, p95", { names: ["age"], colours: ["warn"], format: lasting });
  charts.rate = new Chart("Tokens per second", { names: ["tokens/s"], colours: ["link"], format: short });
  charts.serving = new Chart("Workers serving", { names: ["workers"], colours: ["good"], format: count });
  const byVersion = { over: "version", format: (value) => figure(value) };
  charts.reward = new Chart("Reward by version", { ...byVersion, names: ["reward"], colours: ["link"] });
  charts.stale = new Chart("Staleness by version", { ...byVersion, names: ["behind"], colours: ["warn"], kind: "bar" });
  charts.ages = charts.age.box.querySelector(".legend");
  byId("charts").append(...["flow", "age", "rate", "serving", "reward", "stale"].map((name) => charts[name].box));
}

const last = (values) => values?.findLast(isKnown) ?? null;

function showTimes(state, at) {
  const { series, flow } = state, journal = state.mode === "journal";
  const scope = journal ? "whole run" : "last 15 min", mark = journal ? at : null;
  const [from, to] = windowOf(state);
  const of = (name) => series[name] ?? series.at.map(() => null);
  const over = { x: series.at, from, to, at: mark };
  const done = of("done"), consumed = of("consumed"), knows = consumed.some(isKnown);
  const between = done.map((value, index) => (value === null ? null : knows ? Math.max(0, value - (consumed[index] ?? 0)) : value));
  const bands = [knows ? consumed : done.map((it) => (it === null ? null : 0)), between, of("running"), of("queued")];
  charts.flow.show({ ...over, lines: bands, scope, now: `${short(flow.queued)} queued · ${short(flow.running)} running` });
  charts.age.show({ ...over, lines: [of("age_p95")], scope, now: lasting(last(of("age_p95"))) });
  charts.rate.show({ ...over, lines: [of("tokens_per_s")], scope, now: short(flow.tokens_per_s) });
  charts.serving.show({ ...over, lines: [of("serving")], scope, now: count(last(of("serving"))) });
}

// Entries whose name is a number, by that number.
function byNumber(given) {
  const named = Object.entries(given).map(([name, it]) => [Number(name), it]);
  return named.filter(([number]) => Number.isInteger(number)).sort((a, b) => a[0] - b[0]);
}

function showVersionsOf(state) {
  const versions = byNumber(state.versions);
  const x = versions.map(([version]) => version), newest = versions.at(-1)?.[1];
  const values = (name) => versions.map(([, it]) => it[name] ?? null), scope = `newest ${count(x.length)} versions`;
  charts.reward.show({ x, lines: [values("reward")], scope, now: newest ? figure(last(values("reward"))) : "" });
  charts.stale.show({ x, lines: [values("staleness")], scope, now: newest ? figure(last(values("staleness"))) : "" });
}

function showAges(ages) {
  const rows = AGES.filter((name) => ages?.[name]).map((name) => [name, ages[name]]);
  const told = (it) => (it.n ? `p50 ${lasting(it.p50)}, p95 ${lasting(it.p95)}, ${count(it.n)} jobs` : "none");
  const make = () => el("span", { class: "key" });
  keyed(charts.ages, rows, ([name]) => name, make, (node, [name, it]) => put(node, `${name}: ${told(it)}`));
}

// Of consumed samples: how many were how many versions behind.
function showStaleness(found, over) {
  const rows = byNumber(found).filter((it) => it[1] > 0), sum = (parts) => parts.reduce((all, it) => all + it[1], 0);
  const all = sum(rows), bar = el("div", { class: "stack", "aria-hidden": "true" });
  const key = (text) => el("span", { class: "key" }, el("i", { class: "swatch" }), text);
  const told = rows.slice(0, 8).map(([behind, value]) => key(`${behind} behind: ${percent(value / all)}`));
  rows.slice(0, 8).forEach(([, value], at) => {
    const part = el("i");
    part.style.flexGrow = value / all;
    const colour = `color-mix(in srgb, var(--warn) ${Math.min(100, 25 * at)}%, var(--calm))`;
    part.style.background = told[at].firstChild.style.background = colour;
    bar.append(part);
  });
  if (rows.length > 8) told.push(el("span", { class: "weak" }, `more: ${percent(sum(rows.slice(8)) / all)}`));
  const scope = el("span", { class: "weak scope" }, `${over}${all ? "" : ": none were consumed"}`);
  byId("staleness").replaceChildren(
    el("p", {}, "Staleness of consumed samples ", scope), bar, el("p", { class: "legend" }, ...told));
}

export function showFlow(state, changed, at = null) {
  const is = (name) => !changed || changed.has(name);
  if (is("series") || is("flow")) showTimes(state, at);
  if (is("flow")) showAges(state.flow.ages);
  if (is("versions")) showVersionsOf(state);
  if (is("staleness")) showStaleness(state.staleness, state.mode === "journal" && at === null ? "whole run" : "last 15 min");
}
