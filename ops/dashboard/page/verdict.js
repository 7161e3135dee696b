// What one decides by: the verdict, the pool's figures, and alarms with their paragraphs.
import { bare, byId, count, el, keyed, keyedOrNone, lasting, moment, percent, put, short, since } from "./dom.js";
import { list } from "./rollouts.js";

// States of a pool and severities of alarms, by what they are for who looks.
const TONES = bare({
  healthy: "good", idle: "note", syncing: "note", starved: "warn", saturated: "warn", staleness: "warn",
  standing: "bad", broken: "bad", error: "bad", warn: "warn",
});
const LISTS = bare({ queued: "waiting", running: "running", failed: "dead" });
const GLYPHS = { good: "✓", note: "·", warn: "!", bad: "✕" };

const listed = (node, texts) => {
  keyed(node, texts ?? [], (text) => text, (text) => el("li", { class: "text" }, text), () => {});
  node.parentElement.hidden = !texts?.length;
};

function figures(state) {
  const { flow, workers } = state, mine = Object.values(workers), live = mine.filter((it) => it.alive !== false);
  const sum = (name) => live.reduce((total, it) => total + (it[name] ?? 0), 0);
  return [
    ["workers serving", `${count(live.filter((it) => it.state === "serving").length)} of ${count(mine.length)}`, "now"],
    ["queued", short(flow.queued), "now"],
    ["running", `${short(flow.running)}${sum("max_running") ? ` of ${short(sum("max_running"))}` : ""}`, "now"],
    ["tokens/s", short(flow.tokens_per_s), "now"],
    ["trainer waits", percent(flow.trainer_waits), "last 15 min"],
    ["done", count(flow.done), "since start"],
    ["consumed", count(flow.consumed), "since start"],
    ["failed", count(flow.failed), "since start"],
  ];
}

export function showVerdict(state, changed) {
  const { verdict, at } = state, kind = TONES[verdict.state] ?? "note";
  if (!changed || changed.has("verdict")) {
    put(byId("verdict-state"), `${GLYPHS[kind]} ${verdict.state ?? "unknown"}`);
    byId("verdict-state").className = `chip ${kind}`;
    byId("verdict").style.borderInlineStartColor = `var(--${kind}, var(--weak))`;
    put(byId("verdict-title"), verdict.title);
    listed(byId("verdict-why"), verdict.why);
    listed(byId("verdict-todo"), verdict.todo);
    document.title = `${GLYPHS[kind]} ${verdict.state ?? "?"} – ${state.pool ?? ""} – RolloutMQ`;
  }
  put(byId("verdict-since"), since(verdict.since, at));
  if (changed && !["flow", "workers"].some((name) => changed.has(name))) return;
  const tile = ([name]) => {
    const lists = LISTS[name], click = () => list({ outcome: lists });
    const value = lists ? el("dd", {}, el("button", { type: "button", class: "plain", title: "List them", click })) : el("dd");
    return el("div", {}, el("dt", {}, name, el("span", { class: "scope" })), value);
  };
  keyed(byId("tiles"), figures(state), ([name]) => name, tile, (node, [, value, scope]) => {
    put(node.lastChild.firstElementChild ?? node.lastChild, value);
    put(node.querySelector(".scope"), `, ${scope}`);
  });
}

export function badge(id, number) {
  byId(id).hidden = !number;
  put(byId(id), number ? count(number) : "");
}

export function showAlarms(state, changed) {
  if (changed && !changed.has("alarms")) return;
  const alarms = state.alarms ?? [];
  badge("alarms-count", alarms.filter((it) => it.severity !== "note").length);
  const make = () => el("li", {},
    el("p", {}, el("span", { class: "chip" }), " ", el("b", { class: "text" }), " ", el("span", { class: "weak" })),
    el("p", { class: "evidence text" }), el("p", { class: "prose text" }),
    el("p", { class: "weak" }, "Read further: ", el("code", { class: "text" })));
  keyedOrNone(byId("alarms-list"), alarms, "No alarm.", make, (node, it) => {
    const kind = TONES[it.severity] ?? "note", [line, evidence, prose, further] = node.children, [chip, title, told] = line.children;
    chip.className = `chip ${kind}`;
    put(chip, `${GLYPHS[kind]} ${it.severity}`);
    put(title, it.title);
    put(told, since(it.since, state.at));
    put(evidence, it.evidence);
    put(prose, it.text);
    put(further.lastChild, it.doc);
    further.hidden = !it.doc;
    evidence.hidden = !it.evidence;
  });
}

// Says in a bar that Redis or the server is silent, and since when.
export function showSilence(state, serverSince, problem) {
  const told = [];
  if (serverSince !== null) {
    told.push(`The dashboard's server is silent since ${moment(serverSince, serverSince)}.`);
    told.push("What is below is from then; this page connects again by itself.");
  } else if (state?.silent_s > 3) {
    const from = moment(state.at - state.silent_s, state.at);
    told.push(`Redis has not answered for ${lasting(state.silent_s)}, since ${from}.`);
    told.push("What is below is from then; the server asks again by itself.");
  }
  if (problem) told.push(problem);
  put(byId("silence"), told.join(" "));
}
