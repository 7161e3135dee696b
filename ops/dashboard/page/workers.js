// The workers as a table, for those who read rather than look; only drawn while it is open.
import { byId, count, el, keyed, put, short } from "./dom.js";

const MOST = 200;

export function showWorkers(state, changed) {
  if (!byId("workers-all").open || (changed && !changed.has("workers"))) return;
  const words = byId("workers-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const told = ([id, it]) => `${id} ${it.host ?? ""} ${it.state ?? ""} v${it.version ?? "-"}`.toLowerCase();
  const found = Object.entries(state.workers).filter((it) => words.every((word) => told(it).includes(word)));
  const order = new Intl.Collator("en", { numeric: true }).compare;
  found.sort((a, b) => Number(a[1].alive !== false) - Number(b[1].alive !== false) || order(a[0], b[0]));
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
