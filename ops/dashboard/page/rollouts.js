// The list of rollouts, with its filters.
import { byId, count, el, figure, moment, put, visible } from "./dom.js";
import { rollout, rows } from "./source.js";
import { showRollout } from "./tokens.js";

const listing = { at: null, now: 0, next: null, seen: new Set(), asked: 0 };
const nameOf = (job, sample) => JSON.stringify([job, sample ?? 0]);
function versionsOf({ oldest_version: oldest, newest_version: newest }) {
  return oldest === newest ? newest ?? "–" : `${oldest ?? "?"}–${newest ?? "?"}`;
}

const shortId = (id) => (String(id).length > 20 ? `${String(id).slice(0, 8)}…${String(id).slice(-6)}` : String(id));

function rowOf(row) {
  const click = () => open(row.job_id, row.sample), name = `${shortId(row.job_id)} · ${row.sample ?? 0}`;
  const opens = el("button", { type: "button", class: "plain text", title: visible(row.job_id), click }, name);
  const told = [row.fate ?? row.state, row.why].filter(Boolean).join(": ");
  const kind = row.fate === "trained" ? "good" : row.state === "dead" ? "bad" : row.fate === "dropped" ? "warn" : "note";
  const title = row.finish_reason ? `finish reason: ${visible(row.finish_reason)}` : null;
  const number = (text) => el("td", { class: "n" }, text);
  const made = el("tr", {},
    el("td", {}, moment(row.at, listing.now)), el("td", {}, opens), el("td", { class: `text ${kind}`, title }, told),
    number(count(row.tokens)), number(versionsOf(row)), number(figure(row.reward)), el("td", { class: "text" }, row.worker));
  made.dataset.name = nameOf(row.job_id, row.sample);
  return made;
}

function choose(name) {
  for (const row of byId("rollouts-rows").rows) {
    row.classList.toggle("chosen", row.dataset.name === name);
    row.querySelector("button").setAttribute("aria-current", row.dataset.name === name);
  }
}

// Show one rollout: a row's, a job's that failed, or one of the tree of turns.
export async function open(job, sample) {
  const place = byId("rollout");
  try {
    const found = await rollout(job, sample);
    showRollout(found, open);
    choose(nameOf(found.job_id, found.sample));
  } catch (error) {
    place.replaceChildren(el("p", { class: "bad text" }, `${job}: ${error.message}`));
  }
  place.scrollIntoView({ block: "nearest" });
  place.focus({ preventScroll: true });
}

// Fill the list anew, or add the rows that come after it.
async function fill(more) {
  const wanted = Object.fromEntries(new FormData(byId("rollouts-filter"))), mine = ++listing.asked;
  let found;
  try {
    found = await rows(wanted, more ? listing.next : null, listing.at);
  } catch (error) {
    put(byId("rollouts-told"), error.message);
    return;
  }
  if (mine !== listing.asked) return;
  if (!more) { listing.seen.clear(); byId("rollouts-rows").replaceChildren(); }
  const fresh = found.rows.filter((row) => !listing.seen.has(nameOf(row.job_id, row.sample)));
  for (const row of fresh) listing.seen.add(nameOf(row.job_id, row.sample));
  byId("rollouts-rows").append(...fresh.map(rowOf));
  const guessed = found.rows.length >= 50 && fresh.length ? found.rows.at(-1).at : null;
  listing.next = found.next === undefined ? guessed : found.next;
  byId("rollouts-older").hidden = listing.next === null;
  const { size } = listing.seen, asOf = moment(listing.at ?? listing.now, listing.now);
  const left = found.left ? `; ${count(found.left)} more are left out` : "";
  put(byId("rollouts-told"), (size ? `${wanted.outcome === "waiting" ? "oldest" : "newest"} ${count(size)}, as of ${asOf}` : "none that matches") + left);
}

// at: in history no rollout is later.
export function showRollouts(state, changed, at = null) {
  listing.now = state.at;
  if (!changed && listing.asked && at !== listing.at) { listing.at = at; fill(false); }
  listing.at = at;
}

// Show the list of those that have this worker, or this outcome.
export function list(wanted) {
  const form = byId("rollouts-filter");
  for (const name of ["worker", "version", "outcome"]) form.elements[name].value = wanted[name] ?? "";
  byId("rollouts").scrollIntoView();
  fill(false);
}

export function startRollouts() {
  byId("rollouts-filter").addEventListener("submit", (event) => { event.preventDefault(); fill(false); });
  byId("rollouts-filter").elements.outcome.addEventListener("change", () => fill(false));
  byId("rollouts-older").addEventListener("click", () => fill(true));
  // Asked for once it comes into sight: the first paint does not wait for it.
  const watch = new IntersectionObserver((seen) => { if (seen.some((it) => it.isIntersecting)) { watch.disconnect(); fill(false); } });
  watch.observe(byId("rollouts"));
}
