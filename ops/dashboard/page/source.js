// Where states come from: the server's events, its journal, or the file that this page is.
import { isKnown } from "./dom.js";

const SILENT_MS = 5000, AGAIN_MS = 3000;
const inFile = document.getElementById("run");
export const embedded = inFile ? JSON.parse(inFile.textContent) : null;

// JSON of a route, or an Error that says what a person can read.
export async function asked(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer.");
  }
  const body = await answer.json().catch(() => ({}));
  if (answer.ok) return body;
  throw Object.assign(new Error(body.error?.message ?? `The server answered ${answer.status}.`), { status: answer.status });
}

// Listen to the server for ever. `silent`: called with the time of its last word, or null once it speaks.
export function listen({ snapshot, tick, silent }) {
  let events, heard = Date.now(), said = false;
  const told = () => {
    heard = Date.now();
    if (said) silent(null);
    said = false;
  };
  const open = () => {
    events?.close();
    events = new EventSource("events");
    events.addEventListener("snapshot", (event) => { told(); snapshot(JSON.parse(event.data)); });
    events.addEventListener("tick", (event) => { const start = performance.now(); told(); tick(JSON.parse(event.data), start); });
  };
  open();
  let tried = Date.now();
  setInterval(() => {
    if (Date.now() - heard > SILENT_MS || events.readyState === EventSource.CLOSED) {
      said = true;
      silent(heard / 1000);
    }
    // A browser gives up on an answer that is no stream, and does not see that a connection hangs.
    const hopeless = events.readyState === EventSource.CLOSED ? AGAIN_MS : 4 * SILENT_MS;
    if (Date.now() - Math.max(heard, tried) > hopeless) { tried = Date.now(); open(); }
  }, 1000);
}

// The states of a finished run, by time.
export function past() {
  if (!embedded) return async (at) => asked(`state?at=${encodeURIComponent(at)}&brief=1`);
  const frames = embedded.frames?.length ? embedded.frames : [embedded.state];
  return async (at) => frames.findLast((frame) => frame.at <= at) ?? frames[0];
}

const query = (given) => new URLSearchParams(Object.entries(given).filter(([, value]) => value !== "" && isKnown(value)));

// Rows of the list of rollouts, newest first: {rows, next}. cursor: where the rows before ended. at: none is later.
export async function rows(wanted, cursor, at) {
  if (!embedded) return asked(`rollouts?${query({ limit: 50, ...wanted, before: cursor ?? at })}`);
  const version = wanted.version ? Number(wanted.version) : null;
  const fits = (row) =>
    (!wanted.worker || String(row.worker).includes(wanted.worker)) &&
    (version === null || (row.oldest_version <= version && version <= row.newest_version)) &&
    (!wanted.outcome || row.fate === wanted.outcome || row.state === wanted.outcome);
  const found = (embedded.rows ?? []).filter((row) => fits(row) && !(row.at > (at ?? Infinity))), from = cursor ?? 0;
  return { rows: found.slice(from, from + 50), next: from + 50 < found.length ? from + 50 : null, left: embedded.left_out };
}

export async function rollout(job, sample) {
  if (!embedded) return asked(`rollout/${encodeURIComponent(job)}?sample=${encodeURIComponent(sample ?? 0)}`);
  const found = (embedded.rollouts ?? []).find((it) => it.job_id === job && (it.sample ?? 0) === (sample ?? 0));
  if (!found) throw new Error("This file has the tokens of other samples only.");
  return found;
}
