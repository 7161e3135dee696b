// The workers as a table, for those who read rather than look; only drawn while it is open.
import { byId, count, el, keyed, put, short } from "./dom.js";

const MOST = 200;

// Names in an order in which w9 comes before w10.
export const byName = new Intl.Collator("en", { numeric: true }).compare;

// What the filter above the lanes lets through, of ids of workers; v7 is a version, not the beginning of v71.
export function wanted(workers) {
  const words = byId("workers-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  return (id) => {
    const { host, state, version } = workers[id] ?? {};
    const told = ` ${id} ${host ?? ""} ${state ?? "gone"} v${version ?? "-"} `.toLowerCase();
    return words.every((word) => told.includes(/^v\d+$/.test(word) ? ` ${word} ` : word));
  };
}

export function showWorkers(state, changed) {
  if (!byId("workers-all").open || (changed && !changed.has("workers"))) return;
  const fits = wanted(state.workers), found = Object.entries(state.workers).filter(([id]) => fits(id));
  found.sort((a, b) => Number(a[1].alive !== false) - Number(b[1].alive !== false) || byName(a[0], b[0]));
  const cells = () => ["text", "n", "n", "n", "n", "text"].map((name) => el("td", { class: name }));
  const row = ([id]) => el("tr", {}, el("th", { scope: "row", class: "text" }, id), ...cells());
  keyed(byId("workers-rows"), found.slice(0, MOST), ([id]) => id, row, (node, [, it]) => {
    const state = it.alive === false ? `dead (${it.state})` : it.state;
    const running = `${count(it.running)} of ${count(it.max_running)}`;
    const texts = [state, it.version ?? "–", running, short(it.tokens_per_s), count(it.restarts), it.host];
    texts.forEach((text, at) => put(node.cells[at + 1], text));
    node.className = it.alive === false ? "bad" : "";
  });
  const shown = `now · ${count(Math.min(MOST, found.length))} of ${count(found.length)} are shown, the dead first`;
  put(byId("workers-left"), shown + (found.length > MOST ? "; the filter finds others" : ""));
}
