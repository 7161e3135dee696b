// One rollout: its facts, the tree of its turns, and its tokens, coloured by what one asks.
import { byId, clock, count, definitions, el, figure, isKnown, isNumber, put } from "./dom.js";
import { versionColour } from "./palette.js";

const AT_ONCE = 4000;
const HEAT = "var(--heat)";
const tint = (colour, share) => `color-mix(in srgb, ${colour} ${Math.round(100 * Math.min(1, Math.max(0, share)))}%, transparent)`;
const shown = { way: "version", texts: true };

const some = (values) => [...new Set(values)].filter(Number.isInteger).slice(0, 12);

// What tokens are coloured by: its name, a token's colour, and the tokens of the legend with their names.
const WAYS = {
  version: ["version", ({ version }) => (Number.isInteger(version) ? tint(versionColour(version), 0.3) : ""),
    (tokens) => some(tokens.map((it) => it.version)).map((version) => [{ version }, `v${version}`])],
  logprob: ["logprob", ({ logprob }) => (isNumber(logprob) ? tint(HEAT, Math.min(0.6, -logprob / 10)) : ""),
    () => [-0.1, -1, -4].map((logprob) => [{ logprob }, figure(logprob)])],
  mask: ["mask", ({ mask }) => (mask === 1 ? tint("var(--good)", 0.25) : ""),
    () => [[{ mask: 1 }, "trained on"], [{ mask: 0 }, "masked: struck through"]]],
  leg: ["leg", ({ leg = 0 }) => tint(versionColour(leg), 0.3),
    (tokens) => some(tokens.map((it) => it.leg ?? 0)).map((leg) => [{ leg }, `leg ${leg}`])],
  mismatch: ["replay", ({ mismatch }) => (mismatch ? tint(HEAT, 0.1 + 0.5 * Math.min(1, Math.abs(mismatch))) : ""),
    () => [0.01, 0.1, 1].map((mismatch) => [{ mismatch }, figure(mismatch)])],
};

const written = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t"));

function dress(node, token) {
  const asText = shown.texts && typeof token.text === "string";
  node.style.backgroundColor = WAYS[shown.way][1](token);
  node.classList.toggle("id", !asText);
  put(node, asText ? written(token.text) : token.id);
}

function facts(token, index, rollout) {
  const told = [`token ${index}`, `id ${token.id}`];
  if (typeof token.text === "string") told.push(JSON.stringify(token.text));
  told.push(`version ${token.version ?? "–"}`, `logprob ${figure(token.logprob, 4)}`);
  if (typeof token.logprob === "number") told.push(`probability ${figure(Math.exp(token.logprob))}`);
  told.push(token.mask === 0 ? "masked, not trained on" : token.mask === 1 ? "trained on" : "mask unknown", `leg ${token.leg ?? 0}`);
  if (rollout.legs?.includes(index)) told.push("here a new request to an engine began");
  if (rollout.in_place?.includes(index)) told.push("here weights were switched in place");
  if (typeof token.entropy === "number") told.push(`entropy ${figure(token.entropy)}`);
  if (isKnown(token.mismatch)) told.push(`replay's logprob differs by ${figure(token.mismatch)}`);
  if (isKnown(token.replayed)) told.push(`the replay has ${token.replayed} ${JSON.stringify(token.replayed_text ?? "")}`);
  return told.join(" · ");
}

function drawn(token, index, rollout) {
  const made = el("span", { class: "token", tabindex: -1 });
  dress(made, token);
  if (token.mask === 0) made.classList.add("masked");
  if (rollout.in_place?.includes(index)) made.classList.add("switch");
  else if (index && rollout.legs?.includes(index)) made.classList.add("leg");
  if (isKnown(token.replayed)) made.classList.add("other");
  if (rollout.verdict?.at === index) made.classList.add("first");
  made.dataset.index = index;
  return made;
}

function paint(box, rollout, legend) {
  for (const node of box.querySelectorAll(".token")) dress(node, rollout.tokens[node.dataset.index]);
  const [, back, samples] = WAYS[shown.way];
  legend.replaceChildren(...samples(rollout.tokens).map(([token, name]) => {
    const made = el("span", { class: "swatch-text" }, name);
    made.style.background = back(token);
    return made;
  }));
}

function ways(rollout, again) {
  const made = Object.entries(WAYS).filter(([name]) => name !== "mismatch" || rollout.tokens.some((it) => typeof it.mismatch === "number"));
  if (!made.some(([name]) => name === shown.way)) shown.way = "version";
  const radio = ([name, [told]]) => {
    const input = el("input", { type: "radio", name: "way", value: name, change: () => { shown.way = name; again(); } });
    input.checked = name === shown.way;
    return el("label", {}, input, el("span", {}, told));
  };
  return el("fieldset", { class: "switch-box" }, el("legend", {}, "Colour by"), ...made.map(radio));
}

function tree(rollout, open) {
  const turns = (rollout.turns ?? []).slice(0, 500);
  if (turns.length < 2) return null;
  const depths = [];
  for (const { parent } of turns) depths.push(isKnown(depths[parent]) ? depths[parent] + 1 : 0);
  const items = turns.map((turn, index) => {
    const here = turn.job_id === rollout.job_id && (turn.sample ?? 0) === (rollout.sample ?? 0), swatch = el("i", { class: "swatch" });
    swatch.style.background = versionColour(turn.version);
    const told = [`turn ${turn.turn}`, `${count(turn.tokens)} tokens`, `v${turn.version ?? "–"}`];
    if (isKnown(turn.reward)) told.push(`reward ${figure(turn.reward)}`);
    const given = { type: "button", class: "plain", "aria-current": String(here) };
    const item = el("li", {}, el("button", { ...given, click: () => open(turn.job_id, turn.sample) }, swatch, told.join(" · ")));
    item.style.paddingInlineStart = `${Math.min(12, depths[index])}rem`;
    return item;
  });
  return el("div", {}, el("h4", {}, "Turns"), el("ol", { class: "turns" }, ...items));
}

function factsOf(rollout) {
  const given = Object.entries(rollout.facts ?? {}).map(([name, text]) => [name, String(text)]);
  if (isKnown(rollout.cached_tokens)) given.push(["from the prefix cache", `${count(rollout.cached_tokens)} tokens`]);
  const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  for (const { at, ...others } of rollout.notes ?? []) {
    const told = Object.entries(others).map(([name, value]) => `${name} = ${plain(value)}`).join(", ");
    given.push([isKnown(at) ? `noted at ${clock(at)}` : "noted", told]);
  }
  return definitions(given.slice(0, 60));
}

function promptOf(rollout) {
  const { ids = [], text = null } = rollout.prompt ?? {};
  const whole = (Array.isArray(text) ? text.join("") : text) ?? ids.join(" ");
  const summary = el("summary", {}, `Prompt, ${count(ids.length)} tokens`);
  return el("details", {}, summary, el("pre", { class: "text", tabindex: 0 }, whole));
}

function eventsOf({ events = [] }) {
  if (!events.length) return null;
  const items = events.map((it) => el("li", { class: "text" }, el("span", { class: "weak" }, clock(it.at)), " ", it.text));
  const summary = el("summary", {}, `What happened to it, ${count(events.length)} events`);
  return el("details", {}, summary, el("ol", { class: "events", tabindex: 0 }, ...items));
}

function verdictOf(rollout, jump) {
  const { verdict } = rollout;
  if (!verdict) return null;
  const kind = { same: "good", differs: "bad" }[verdict.state] ?? "warn";
  const made = el("p", {}, el("span", { class: `chip ${kind}` }, `replay: ${verdict.state}`), " ");
  made.append(el("span", { class: "text" }, verdict.text), " ");
  if (isKnown(verdict.at)) {
    made.append(el("button", { type: "button", click: () => jump(verdict.at) }, `Go to token ${count(verdict.at)}`));
  }
  return made;
}

function samplesOf({ job_id: job, sample = 0, samples = 1 }, open) {
  if (samples < 2) return null;
  const buttons = Array.from({ length: Math.min(64, samples) }, (_, at) => {
    const given = { type: "button", "aria-current": String(at === sample), "aria-label": `Sample ${at}` };
    return el("button", { ...given, click: () => open(job, at) }, String(at));
  });
  return el("p", { class: "samples" }, "Samples of this job: ", ...buttons);
}

// Of a long rollout a part is drawn, and more on demand.
function tokensOf(rollout, say) {
  const label = "Tokens; the arrow keys go from one to the next";
  const box = el("div", { class: "tokens text", tabindex: 0, role: "group", "aria-label": label });
  const more = el("button", { type: "button", click: () => grow(AT_ONCE) });
  let until = 0;
  const grow = (by) => {
    const next = Math.min(rollout.tokens.length, until + by), made = [];
    for (let index = until; index < next; index++) made.push(drawn(rollout.tokens[index], index, rollout));
    box.append(...made);
    until = next;
    more.hidden = until >= rollout.tokens.length;
    put(more, `Show ${count(Math.min(AT_ONCE, rollout.tokens.length - until))} more of ${count(rollout.tokens.length - until)} tokens`);
  };
  const tell = (event) => { const node = event.target.closest?.(".token"); if (node) say(Number(node.dataset.index)); };
  for (const kind of ["mouseover", "focusin", "click"]) box.addEventListener(kind, tell);
  box.addEventListener("keydown", (event) => {
    const here = document.activeElement, at = here === box ? -1 : Number(here.dataset.index);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: until - 1 }[event.key];
    if (next === undefined) return;
    box.children[Math.min(until - 1, Math.max(0, next))]?.focus();
    event.preventDefault();
  });
  const jump = (index) => {
    if (index >= until) grow(index - until + AT_ONCE);
    box.children[index]?.focus({ preventScroll: true });
    box.children[index]?.scrollIntoView({ block: "center" });
  };
  grow(AT_ONCE);
  return { box, more, jump };
}

// open: a call that shows another rollout.
export function showRollout(rollout, open) {
  rollout.tokens ??= [];
  const line = el("p", { class: "facts text", role: "status" }, "Point at a token, or go there with the arrow keys.");
  const { box, more, jump } = tokensOf(rollout, (index) => put(line, facts(rollout.tokens[index], index, rollout)));
  const legend = el("span", { class: "legend" }), again = () => paint(box, rollout, legend);
  const texts = el("input", { type: "checkbox", change: (event) => { shown.texts = event.target.checked; again(); } });
  texts.checked = shown.texts;
  byId("rollout").replaceChildren(...[
    el("h3", { class: "text" }, `${rollout.job_id} · sample ${rollout.sample ?? 0}`), verdictOf(rollout, jump),
    samplesOf(rollout, open), factsOf(rollout), tree(rollout, open), promptOf(rollout), eventsOf(rollout),
    el("div", { class: "tools" }, ways(rollout, again), el("label", {}, texts, "as text"), legend), box, more, line].filter(Boolean));
  again();
}
