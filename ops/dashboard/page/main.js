// The page: takes states, and draws what changed of them.
import { byId, clock, day, put } from "./dom.js";
import { showFailures } from "./failures.js";
import { showFlow, startFlow } from "./flow.js";
import { showLegend } from "./glyphs.js";
import { startHistory } from "./history.js";
import { whenThemeChanges } from "./palette.js";
import { showReplay } from "./replay.js";
import { showRibbon, startRibbon } from "./ribbon.js";
import { showRollouts, startRollouts } from "./rollouts.js";
import { asked, embedded, listen } from "./source.js";
import { apply, whole } from "./state.js";
import { showAlarms, showSilence, showVerdict } from "./verdict.js";
import { showWorkers } from "./workers.js";

const RETRY_MS = 3000;
export const page = { state: null, at: null, changed: new Set(), all: false, due: null, silentSince: null, problem: "", painted: false };

// How long something took, for whoever measures: the browser's own list of measures. Few are kept.
function measure(name, start) {
  if (performance.getEntriesByName(name, "measure").length > 500) performance.clearMeasures(name);
  performance.measure(name, { start, end: performance.now() });
}

function drawAll() {
  const { state, at } = page, changed = page.all ? null : page.changed;
  page.changed = new Set();
  page.all = false;
  showSilence(state, page.silentSince, page.problem);
  if (!state) return;
  put(byId("pool"), state.pool ?? "");
  const now = at ?? state.at, connected = page.silentSince === null ? "live" : "not connected";
  put(byId("clock"), `${state.mode === "journal" ? "a finished run" : connected} · ${day(now)} ${clock(now)}`);
  showVerdict(state, changed);
  showLegend(changed);
  showRibbon(state, changed, at);
  showWorkers(state, changed);
  showFlow(state, changed, at);
  showFailures(state, changed);
  showRollouts(state, changed, at);
  showAlarms(state, changed);
}

// Draw at the next frame; `start` is when the change arrived, for the measure.
function due(start = performance.now()) {
  if (page.due !== null) return;
  page.due = start;
  requestAnimationFrame(() => {
    const begun = page.due, channel = new MessageChannel();
    page.due = null;
    drawAll();
    // Behind the frame's layout and paint.
    channel.port1.onmessage = () => {
      if (!page.state) return;
      measure("update", begun);
      if (!page.painted) measure("first-paint", 0);
      page.painted = true;
    };
    channel.port2.postMessage(null);
  });
}

const redraw = () => { page.all = true; due(); };

function take(state, at = null) {
  page.state = whole(state, page.state);
  page.at = at;
  redraw();
}

function trouble(text) {
  page.problem = text;
  due();
}

function live() {
  listen({
    snapshot: take,
    tick: (tick, start) => {
      for (const name of apply(page.state, tick)) page.changed.add(name);
      due(start);
    },
    silent: (from) => { page.silentSince = from; due(); },
  });
}

function journal(end) {
  take(end);
  if (typeof end.began === "number") startHistory(page.state, (state, at, problem) => { if (state) take(state, at); trouble(problem); });
}

async function start() {
  if (embedded) {
    if (embedded.state) journal(embedded.state);
    else for (const part of document.querySelectorAll("main > section:not(#rollouts), nav")) part.hidden = true;
    if (embedded.replay) showReplay(embedded.replay);
    return;
  }
  try {
    const first = await asked("state?brief=1");
    if (first.mode === "journal") journal(await asked("state"));
    else live();
    trouble("");
  } catch (error) {
    trouble(`${error.message} This page asks again.`);
    setTimeout(start, RETRY_MS);
  }
}

// Parts above the one that was asked for may still grow: it is gone to again.
let aim = location.hash, until = Infinity;
const forget = () => { aim = ""; };
const again = () => { if (aim && page.state && performance.now() < until) byId(aim.slice(1))?.scrollIntoView(); };
document.querySelector("nav").addEventListener("click", (event) => { aim = event.target.hash ?? ""; until = performance.now() + 3000; });
for (const name of ["wheel", "touchmove", "keydown"]) addEventListener(name, forget, { passive: true });
new ResizeObserver(again).observe(document.querySelector("main"));

startRibbon();
startFlow();
startRollouts();
for (const id of ["workers-filter", "workers-trouble"]) byId(id).addEventListener("input", redraw);
byId("workers-all").addEventListener("toggle", redraw);
whenThemeChanges(redraw);
start();
