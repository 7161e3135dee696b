// The pool's state as the page has it: a snapshot, and what ticks change of it. Names in it may be any text.
import { bare } from "./dom.js";

export const WINDOW_S = 900;

// What is shown, as [from, to]: a whole run, or the last 15 minutes, of which a page that has just begun knows a part.
export function windowOf({ mode, at, began, ended }) {
  return mode === "journal" ? [began, ended ?? at] : [Math.max(at - WINDOW_S, Math.min(began ?? 0, at - 60)), at];
}
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

// RFC 7386.
export function merged(target, patch) {
  if (!isObject(patch)) return patch;
  const made = bare(isObject(target) ? target : {});
  for (const name of Object.keys(patch)) {
    if (patch[name] === null) delete made[name];
    else made[name] = isObject(patch[name]) ? merged(made[name], patch[name]) : patch[name];
  }
  return made;
}

const EMPTY = {
  verdict: {}, workers: {}, publishes: [], staleness: {}, flow: {}, versions: {}, failures: [], alarms: [],
  lanes: {}, series: { at: [] },
};

// A whole state. What it leaves out of lanes, series and publishes is kept from the one before.
export function whole(given, before) {
  const made = bare(EMPTY);
  for (const name of ["lanes", "series", "publishes"]) if (before?.[name]) made[name] = before[name];
  Object.assign(made, bare(given));
  for (const name of ["workers", "staleness", "versions", "lanes"]) made[name] = bare(made[name]);
  return made;
}

function grow(series, points, at) {
  series.at.push(at);
  for (const name of new Set([...Object.keys(series), ...Object.keys(points)])) {
    if (name === "at") continue;
    const values = (series[name] ??= []);
    while (values.length < series.at.length - 1) values.push(null);
    values.push(points[name] ?? null);
  }
  const old = series.at.findIndex((it) => it >= at - WINDOW_S);
  if (old > 60) for (const values of Object.values(series)) values.splice(0, old);
}

function extend(lanes, tick) {
  const lane = (id) => (lanes[id] ??= { spans: [], ticks: [] });
  for (const [id, spans] of Object.entries(tick.spans ?? {})) {
    const mine = lane(id).spans;
    for (const span of spans) {
      const place = mine.findLastIndex((it) => it[0] <= span[0]);
      if (place >= 0 && mine[place][0] === span[0]) { mine[place] = span; continue; }
      mine.splice(place + 1, 0, span);
      if (place >= 0) mine[place][1] ??= span[0];
    }
  }
  for (const [id, ticks] of Object.entries(tick.ticks ?? {})) lane(id).ticks.push(...ticks);
  for (const id of tick.gone ?? []) delete lanes[id];
}

function trim(lanes, from) {
  for (const lane of Object.values(lanes)) {
    const kept = lane.spans.findIndex((it) => it[1] === null || it[1] === undefined || it[1] >= from);
    if (kept > 0) lane.spans.splice(0, kept);
    if (lane.ticks.length && lane.ticks[0][0] < from) lane.ticks = lane.ticks.filter((it) => it[0] >= from);
  }
}

// Apply a tick to the state, and say which parts of it changed.
export function apply(state, tick) {
  const patch = tick.patch ?? {}, changed = new Set(Object.keys(patch));
  Object.assign(state, bare(EMPTY), merged(state, patch), { lanes: state.lanes, series: state.series });
  if (Object.keys(tick.points ?? {}).length) {
    grow(state.series, tick.points, tick.points.at ?? state.at);
    changed.add("series");
  }
  extend(state.lanes, tick);
  if (Math.floor(state.at) % 60 === 0) trim(state.lanes, state.at - WINDOW_S);
  changed.add("at").add("lanes");
  return changed;
}
