// Failures, grouped by their normalised cause, and the requeue of a group.
import { byId, count, el, keyed, keyedOrNone, moment, put } from "./dom.js";
import { open } from "./rollouts.js";
import { asked } from "./source.js";
import { badge } from "./verdict.js";

const TOKEN = "rolloutmq-token", FEW = 20;
let most = FEW;
const tell = (text) => put(byId("failures-said"), text);

// The token of this tab: asked for once. null: who was asked does not want to.
function token() {
  const had = sessionStorage.getItem(TOKEN);
  if (had) return Promise.resolve(had);
  const asks = byId("asks"), field = byId("asks-token");
  field.value = "";
  asks.returnValue = "";
  asks.showModal();
  return new Promise((resolve) => {
    asks.addEventListener("close", () => resolve(asks.returnValue === "go" ? field.value : null), { once: true });
  });
}

async function requeue(group, button) {
  const mine = await token();
  if (!mine) return;
  button.disabled = true;
  try {
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${mine}` };
    const { requeued } = await asked("requeue", { method: "POST", headers, body: JSON.stringify({ cause: group.id }) });
    sessionStorage.setItem(TOKEN, mine);
    tell(`${count(requeued)} ${requeued === 1 ? "job" : "jobs"} queued again: ${group.cause}`);
  } catch (error) {
    if (error.status === 401 || error.status === 403) sessionStorage.removeItem(TOKEN);
    tell(`Nothing was requeued. ${error.message}`);
  }
  button.disabled = false;
}

function failure() {
  const button = el("button", { type: "button" }, "Requeue");
  const jobs = el("span", { class: "jobs legend" });
  const node = el("li", { class: "failure" },
    el("b", { class: "count" }),
    el("div", { class: "what" },
      el("p", { class: "cause text" }),
      el("p", { class: "weak when" }),
      el("details", {}, el("summary", {}, "Example and jobs"), el("pre", { class: "text", tabindex: 0 }), jobs)),
    button);
  node.job = (id) => el("button", { type: "button", class: "plain text", click: () => open(id, 0) }, id);
  button.addEventListener("click", () => requeue(node.group, button));
  return node;
}

export function showFailures(state, changed) {
  if (changed && !changed.has("failures")) return;
  const groups = [...(state.failures ?? [])].sort((a, b) => b.count - a.count), all = groups.reduce((sum, it) => sum + it.count, 0);
  badge("failures-count", all);
  const told = `${count(all)} jobs in ${count(groups.length)} ${groups.length === 1 ? "group" : "groups"}, since start`;
  const lacks = !state.can_act && state.mode !== "journal" ? " · read-only: no token was given to the dashboard" : "";
  put(byId("failures-told"), told + lacks);
  const more = byId("failures-more");
  more.hidden = groups.length <= most;
  put(more, `Show ${count(groups.length - most)} more groups`);
  more.onclick = () => { most = Infinity; showFailures(state, null); };
  keyedOrNone(byId("failures-list"), groups.slice(0, most), "No job failed.", failure, (node, it) => {
    node.group = it;
    put(node.querySelector(".count"), count(it.count));
    put(node.querySelector(".cause"), it.cause);
    put(node.querySelector(".when"), `first ${moment(it.first, state.at)}, last ${moment(it.last, state.at)}`);
    put(node.querySelector("pre"), it.example);
    keyed(node.querySelector(".jobs"), it.jobs ?? [], (id) => id, node.job, () => {});
    const button = node.lastElementChild;
    button.hidden = !(state.can_act && it.requeueable);
    button.setAttribute("aria-label", `Requeue ${count(it.count)} jobs: ${String(it.cause).slice(0, 80)}`);
  });
}
