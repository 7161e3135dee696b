// The report of a replay: what was compared, what differs by version and worker, and the worst samples.
import { bare, byId, count, definitions, el, figure, isKnown } from "./dom.js";
import { showRollout } from "./tokens.js";

const INFINITE = 1e38;
const KINDS = bare({ same: "good", differs: "bad", unverified: "warn" });
const chip = (state, text = state) => el("span", { class: `chip ${KINDS[state] ?? "note"}` }, text);

function gap(value) {
  if (typeof value !== "number") return "–";
  return Math.abs(value) < INFINITE ? figure(value, 4) : value > 0 ? "∞" : "−∞";
}

// heads: names of columns; those that begin with # have numbers.
function table(label, heads, rows) {
  const kind = (head) => (head.startsWith("#") ? "n" : "text"), column = (head) => head.replace("#", "");
  const head = heads.map((name) => el("th", { scope: "col", class: kind(name) }, column(name)));
  const line = (cells) => cells.map((cell, at) => el("td", { class: kind(heads[at]) }, cell));
  const body = rows.map(({ cells, bad }) => el("tr", { class: bad ? "bad" : null }, ...line(cells)));
  const made = el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
  return [el("h3", {}, label), el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, made)];
}

const COUNTS = ["samples", "same", "differs", "unverified", "first_differences", "tokens", "other_tokens"];
const GAPS = ["mean_gap", "mean_size", "largest_gap"];

function tallies(label, name, found) {
  const heads = [name, ...[...COUNTS, ...GAPS].map((it) => `#${it.replace("_", " ").replace("size", "|gap|")}`)];
  const cells = (it) => [it[name], ...COUNTS.map((what) => count(it[what])), ...GAPS.map((what) => gap(it[what]))];
  return table(label, heads, (found ?? []).map((it) => ({ cells: cells(it), bad: it.first_differences > 0 })));
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
  const between = edges.slice(1).map((edge, at) => `${short(edges[at])} to ${short(edge)}`);
  const names = [`below ${short(edges[0])}`, ...between, `${short(edges.at(-1))} or more`];
  const sizes = names.map((name, at) => [name, found.tokens[at] ?? 0, (at ? edges[at - 1] : 0) >= limit]);
  const rows = [["exactly equal", found.exactly_equal, false], ...sizes, ["unknown", found.unknown, false]];
  return rows.map(([name, tokens, bad]) => [name, count(tokens), Math.log10(1 + tokens), bad]);
}

const reasonsOf = (row) => (row.reasons ?? []).join("; ");

function tokensOfReplay(detail, texts) {
  const versionAt = (place) => detail.spans.find(([, from, to]) => from <= place && place < to)?.[0];
  const masks = detail.of_each_token?.mask ?? detail.of_each_token?.loss_mask;
  return detail.ids.map((id, index) => {
    const place = detail.start + index, replayed = detail.replayed[index];
    return {
      id, text: texts[id], replayed, replayed_text: texts[replayed], version: versionAt(place), mask: masks?.[index],
      leg: detail.legs.filter((it) => 0 < it && it <= place).length, mismatch: detail.gaps[index],
      logprob: detail.logprobs?.[index], entropy: detail.entropy?.[index],
    };
  });
}

// A sample of the report, as the viewer of rollouts has it.
function asRollout(row, texts) {
  const { detail } = row, ids = detail.prompt ?? [], words = ids.map((id) => texts[id]);
  const here = (places) => places.map((it) => it - detail.start);
  const facts = {
    worker: row.worker, attempt: row.attempt, client: row.client, group: row.group, "ended with": row.finish,
    "look further": row.look, ...row.notes, ...row.metadata,
  };
  if (detail.left_out) facts.shown = `from token ${detail.start} on; ${count(detail.left_out)} are left out`;
  return {
    job_id: row.job, sample: row.sample, facts, tokens: tokensOfReplay(detail, texts),
    prompt: { ids, text: words.every(isKnown) ? words : null }, legs: here(detail.legs), in_place: here(detail.in_place),
    verdict: { state: row.state, text: reasonsOf(row), at: isKnown(row.first) ? row.first - detail.start : null },
  };
}

const SAMPLE = ["state", "sample", "#first", "#version", "worker", "#attempt", "#tokens", "#other", "#largest |gap|", "reasons"];

function samples(replay) {
  const show = (row) => {
    showRollout(asRollout(row, replay.texts ?? {}), () => {});
    byId("rollout").scrollIntoView();
    byId("rollout").focus({ preventScroll: true });
  };
  const name = (row) => el("button", { type: "button", class: "plain text", click: () => show(row) }, row.name);
  const cells = (row) => [
    chip(row.state), row.detail ? name(row) : row.name, row.first ?? "–", row.version ?? (row.versions ?? []).join(", "),
    row.worker, row.attempt, count(row.tokens), count(row.other_tokens), gap(row.largest_gap), reasonsOf(row)];
  return table("Samples, the worst first", SAMPLE, (replay.listed ?? []).map((row) => ({ cells: cells(row) })));
}

// A column for each engine that recorded or replayed, a row for each part of their fingerprints.
function engines({ engines: { recorded = [], replayed = [] } = {} }) {
  const named = (side, found) => found.slice(0, 4).map((it) => [`${side}, ${count(it.samples)} samples`, it.fingerprint]);
  const sides = [...named("recorded", recorded), ...named("replayed", replayed)];
  const rows = [...new Set(sides.flatMap(([, it]) => Object.keys(it)))].map((part) => {
    const values = sides.map(([, it]) => String(it[part] ?? "–"));
    return { cells: [part, ...values], bad: new Set(values).size > 1 };
  });
  return rows.length ? table("Engines", ["part", ...sides.map(([name]) => name)], rows) : [];
}

// What the report does not show.
function leftOut({ unread = 0, left_out: { of_the_list: rows = 0, token_by_token: tokens = 0 } = {} }) {
  const unlisted = `${count(unread)} samples could not be read, ${count(rows)} better ones are not listed`;
  return el("p", { class: "weak" }, `${unlisted}, ${count(tokens)} are not here token by token.`);
}

function headline({ states, samples: all }) {
  if (states.same === all) return `All ${count(all)} samples are the same`;
  return `${count(states.differs)} of ${count(all)} samples differ, ${count(states.unverified)} could not be verified`;
}

function told({ total, limits }) {
  const tokens = `${count(total.tokens)} tokens, ${count(total.other_tokens)} of them other ones`;
  return `${tokens}; largest difference of a log-probability ${gap(total.largest_gap)}, allowed ${gap(limits.logprob)}`;
}

function placesOf({ positions = [], limits }) {
  const bar = ({ largest }) => [gap(largest), Math.log10(1 + largest * 1e9), largest > limits.logprob];
  return positions.map((it) => [`${it.start} to ${it.end - 1}`, ...bar(it)]);
}

export function showReplay(replay) {
  const states = Object.keys(KINDS).flatMap((state) => [chip(state, `${count(replay.states[state])} ${state}`), " "]);
  byId("replay-body").replaceChildren(
    el("p", {}, ...states), el("p", { class: "headline" }, headline(replay)), el("p", { class: "weak" }, told(replay)),
    definitions(Object.entries(replay.about ?? {})),
    ...(replay.reasons ?? []).map((it) => el("p", { class: "text" }, `${count(it.samples)} × ${it.reason}`)),
    ...engines(replay), ...tallies("By version of the weights", "version", replay.versions), ...tallies("By worker", "worker", replay.workers),
    el("div", { class: "figures" },
      bars("Tokens by difference of log-probabilities; bars are logarithmic", histogram(replay.histogram, replay.limits.logprob)),
      bars("Largest difference by place in the sample; bars are logarithmic", placesOf(replay))),
    ...samples(replay), leftOut(replay));
  byId("replay").hidden = byId("replay-link").hidden = false;
}
