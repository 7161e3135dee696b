// The report of a replay: what was compared, what differs by version and worker, and the worst samples.
import { bare, byId, count, el, figure } from "./dom.js";
import { showRollout } from "./tokens.js";

const INFINITE = 1e38;
const KINDS = bare({ same: "good", differs: "bad", unverified: "warn" });
const gap = (value) => (typeof value !== "number" ? "–" : Math.abs(value) >= INFINITE ? (value > 0 ? "∞" : "−∞") : figure(value, 4));
const chip = (state, text = state) => el("span", { class: `chip ${KINDS[state] ?? "note"}` }, text);

function table(heads, rows, label) {
  const head = el("tr", {}, ...heads.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
  const body = rows.map(({ cells, bad }) => el("tr", { class: bad ? "bad" : null }, ...cells.map((cell, at) => el("td", { class: heads[at][1] ?? "text" }, cell))));
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

function tallies(title, name, found) {
  const heads = [[name], ...["samples", "same", "differ", "unverified", "first differences", "tokens", "other tokens", "mean gap", "mean |gap|", "largest |gap|"].map((it) => [it, "n"])];
  const cells = (it) => [String(it[name]), ...[it.samples, it.same, it.differs, it.unverified, it.first_differences, it.tokens, it.other_tokens].map(count), ...[it.mean_gap, it.mean_size, it.largest_gap].map(gap)];
  return [el("h3", {}, title), table(heads, (found ?? []).map((it) => ({ cells: cells(it), bad: it.first_differences > 0 })), title)];
}

// Bars with their figures: [name, told, length, bad]
function bars(title, found) {
  const most = Math.max(1e-9, ...found.map((it) => it[2]));
  const rows = found.map(([name, told, length, bad]) => {
    const bar = el("i", { class: bad && length ? "bar bad" : "bar" });
    bar.style.width = `${(100 * length) / most}%`;
    return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "n" }, told), el("td", { class: "track" }, bar));
  });
  return el("figure", {}, el("figcaption", {}, title), el("table", { class: "bars" }, el("tbody", {}, ...rows)));
}

function histogram(found, limit) {
  const edges = found.edges ?? [], short = (value) => (value && value < 1e-3 ? value.toExponential(1).replace(".0", "") : figure(value, 2));
  const names = [`below ${short(edges[0] ?? 0)}`, ...edges.slice(1).map((edge, at) => `${short(edges[at])} to ${short(edge)}`), `${short(edges.at(-1) ?? 0)} or more`];
  const rows = names.map((name, at) => [name, found.tokens[at] ?? 0, (at ? edges[at - 1] : 0) >= limit]);
  return [["exactly equal", found.exactly_equal, false], ...rows, ["unknown", found.unknown, false]].map(([name, tokens, bad]) => [name, count(tokens), Math.log10(1 + tokens), bad]);
}

// A sample of the report, as the viewer of rollouts has it.
export function asRollout(row, texts) {
  const { detail } = row, text = (id) => texts[id] ?? null;
  const versionAt = (place) => detail.spans.find(([, from, to]) => from <= place && place < to)?.[0] ?? null;
  const masks = detail.of_each_token?.mask ?? detail.of_each_token?.loss_mask;
  let leg = detail.legs.filter((it) => it < detail.start).length;
  const tokens = detail.ids.map((id, index) => {
    const place = detail.start + index, other = detail.replayed[index] ?? null;
    if (place && detail.legs.includes(place)) leg += 1;
    return { id, text: text(id), version: versionAt(place), logprob: detail.logprobs?.[index] ?? null, mask: masks?.[index] ?? null, leg, mismatch: detail.gaps[index], entropy: detail.entropy?.[index], replayed: other, replayed_text: other === null ? null : text(other) };
  });
  const ids = detail.prompt ?? [], words = ids.map(text), here = (places) => places.map((it) => it - detail.start);
  const facts = { worker: row.worker, attempt: row.attempt, client: row.client, group: row.group, "ended with": row.finish, reasons: (row.reasons ?? []).join("; "), "look further": row.look, ...row.notes, ...row.metadata };
  if (detail.start || detail.left_out) facts.shown = `tokens ${detail.start} to ${detail.start + tokens.length - 1}; ${count(detail.left_out)} are left out`;
  return {
    job_id: row.job, sample: row.sample, samples: 1, prompt: { ids, text: words.every((it) => it !== null) ? words : null }, tokens, facts,
    legs: here(detail.legs), in_place: here(detail.in_place), turns: [], notes: [], events: [],
    verdict: { state: row.state === "unverified" ? "unchecked" : row.state, text: (row.reasons ?? []).join("; "), at: row.first === null ? null : row.first - detail.start },
  };
}

function samples(replay) {
  const heads = [["state"], ["sample"], ["first", "n"], ["version", "n"], ["worker"], ["attempt", "n"], ["tokens", "n"], ["other", "n"], ["largest |gap|", "n"], ["reasons"]];
  const show = (row) => { showRollout(asRollout(row, replay.texts ?? {}), () => {}); byId("rollout").scrollIntoView(); byId("rollout").focus({ preventScroll: true }); };
  const cells = (row) => [chip(row.state), row.detail ? el("button", { type: "button", class: "plain text", click: () => show(row) }, row.name) : row.name, row.first ?? "–", row.version ?? (row.versions ?? []).join(", "), row.worker, row.attempt, count(row.tokens), count(row.other_tokens), gap(row.largest_gap), (row.reasons ?? []).join("; ")];
  return [el("h3", {}, "Samples, the worst first"), table(heads, (replay.listed ?? []).map((row) => ({ cells: cells(row), bad: false })), "Samples, the worst first")];
}

export function showReplay(replay) {
  const { states, total, limits } = replay;
  const headline = states.same === replay.samples ? `All ${count(replay.samples)} samples are the same` : `${count(states.differs)} of ${count(replay.samples)} samples differ, ${count(states.unverified)} could not be verified`;
  const told = `${count(total.tokens)} tokens, ${count(total.other_tokens)} of them other ones; largest difference of a log-probability ${gap(total.largest_gap)}, allowed ${gap(limits.logprob)}`;
  const about = Object.entries(replay.about ?? {}).flatMap(([name, text]) => [el("dt", { class: "text" }, name), el("dd", { class: "text" }, text)]);
  const places = (replay.positions ?? []).map((it) => [`${it.start} to ${it.end - 1}`, gap(it.largest), Math.log10(1 + it.largest * 1e9), it.largest > limits.logprob]);
  byId("replay-body").replaceChildren(
    el("p", { class: "line" }, ...Object.keys(KINDS).flatMap((state) => [chip(state, `${count(states[state])} ${state}`), " "])), el("p", { class: "headline" }, headline), el("p", { class: "weak" }, told),
    el("dl", { class: "facts-list" }, ...about), ...(replay.reasons ?? []).map((it) => el("p", { class: "text" }, `${count(it.samples)} × ${it.reason}`)),
    ...tallies("By version of the weights", "version", replay.versions), ...tallies("By worker", "worker", replay.workers),
    el("div", { class: "figures" }, bars("Differences of log-probabilities: tokens of each size, bars are logarithmic", histogram(replay.histogram, limits.logprob)), places.length ? bars("Largest difference by place in the sample, bars are logarithmic", places) : null),
    ...samples(replay));
  byId("replay").hidden = byId("replay-link").hidden = false;
}
