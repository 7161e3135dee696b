// A chart on a canvas: lines, bands on one another, or bars; over time or over versions.
import { clock, day, el, isKnown, put } from "./dom.js";
import { fitted, theme } from "./palette.js";

const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

// Ticks of a time axis: [time, label], at round local times, so that labels have room.
export function timeTicks(from, to, width) {
  const least = (to - from) / Math.max(1, Math.floor(width / 72));
  const step = STEPS_S.find((it) => it >= least) ?? Math.ceil(least / 604800) * 604800;
  const offset = new Date(from * 1000).getTimezoneOffset() * 60, made = [];
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to && made.length < 100; at += step) {
    made.push([at, step >= 86400 ? day(at).slice(5) : clock(at, step < 60)]);
  }
  return made;
}

// Round numbers from `least` to `most`, about `wanted` of them.
function niceTicks(least, most, wanted) {
  const rough = (most - least) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((it) => it * power >= rough) ?? 10), made = [];
  const first = Math.ceil(least / step), last = Math.floor(most / step + 1e-6);
  for (let at = first; at <= last && made.length < 50; at++) made.push(at * step);
  return made;
}

// Draws the ticks and labels of a time axis below `bottom`; each label stays between `left` and `right`.
export function drawTimes(pen, ticks, xOf, left, right, top, bottom) {
  const { weak, line } = theme();
  pen.textAlign = "center";
  for (const [at, label] of ticks) {
    const x = xOf(at), half = pen.measureText(label).width / 2;
    pen.fillStyle = line;
    pen.fillRect(Math.round(x), top, 1, bottom - top + 3);
    pen.fillStyle = weak;
    pen.fillText(label, Math.min(right - half, Math.max(left + half, x)), bottom + 11);
  }
}

// A line from top to bottom: dashed at the time of the slider, plain where one points.
export function drawGuide(pen, x, dashed, top, bottom) {
  pen.strokeStyle = dashed ? theme().text : theme().weak;
  pen.setLineDash(dashed ? [4, 3] : []);
  pen.beginPath();
  pen.moveTo(Math.round(x) + 0.5, top);
  pen.lineTo(Math.round(x) + 0.5, bottom);
  pen.stroke();
  pen.setLineDash([]);
}

const RIGHT = 8, TOP = 8, BOTTOM = 20;

export class Chart {
  // names and colours: of the series. kind: line, band or bar. format: of values. over: what the x axis is.
  constructor(title, { names, colours, kind = "line", format, over = "time" }) {
    Object.assign(this, { title, names, colours, kind, format, over, data: { x: [], lines: [] }, at: null, cursor: null, seen: false });
    this.scope = el("span", { class: "weak scope" });
    this.now = el("span", { class: "now" });
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": title });
    this.readout = el("p", { class: "readout", role: "status" });
    const keys = names.map((name) => el("span", { class: "key" }, el("i", { class: "swatch" }), name));
    this.swatches = keys.map((key) => key.firstChild);
    this.box = el("figure", { class: "chart" },
      el("figcaption", {}, el("span", { class: "name" }, title), this.now, this.scope), this.canvas,
      el("div", { class: "under" }, el("span", { class: "legend" }, ...(names.length > 1 ? keys : [])), this.readout));
    this.canvas.addEventListener("pointermove", (event) => this.point(this.nearest(event.offsetX)));
    for (const name of ["pointerleave", "blur"]) this.canvas.addEventListener(name, () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    // What is out of sight is not drawn: nobody waits for it.
    const sight = (seen) => { this.seen = seen.at(-1).isIntersecting; this.draw(); };
    new IntersectionObserver(sight, { rootMargin: "200px" }).observe(this.canvas);
  }

  // x: ascending. lines: values of each series, null where unknown. now: the figure to say. at: a time to mark.
  show({ x, lines, from, to, now = "", scope = "", at = null }) {
    this.data = { x, lines, from: from ?? x[0], to: to ?? x[x.length - 1] };
    this.at = at;
    put(this.now, now);
    put(this.scope, scope);
    this.canvas.setAttribute("aria-label", `${this.title}, ${scope}: ${now || this.told(x.length - 1)}. Arrow keys read values.`);
    this.draw();
  }

  // For bands each series on top of those before it.
  heights() {
    if (this.kind !== "band") return this.data.lines;
    const sums = this.data.x.map(() => 0);
    return this.data.lines.map((line) => line.map((value, index) => (sums[index] += value ?? 0)));
  }

  range(heights) {
    const known = heights.flat().filter(isKnown), least = Math.min(...known, ...(this.kind === "band" ? [] : [0]));
    if (!known.length) return [0, 1];
    let most = Math.max(...known);
    if (most <= least) most = least + Math.max(1, Math.abs(least) * 0.1);
    return [least, most + (most - least) * 0.05];
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!this.seen || !width || !height) return;
    const pen = fitted(this.canvas), { weak, line } = theme(), heights = this.heights();
    this.swatches.forEach((swatch, index) => { swatch.style.background = this.colour(index); });
    const [least, most] = this.range(heights), bottom = height - BOTTOM;
    const yTicks = niceTicks(least, most, Math.max(2, (bottom - TOP) / 32)), labels = yTicks.map((it) => this.format(it));
    const left = Math.ceil(Math.max(24, ...labels.map((it) => pen.measureText(it).width))) + 8, right = width - RIGHT;
    const { from, to } = this.data, span = this.over === "version" ? to - from + 1 : to - from || 1;
    const xOf = (this.xOf = (x) => left + ((x - from + (this.over === "version" ? 0.5 : 0)) / span) * (right - left));
    const yOf = (value) => bottom - ((value - least) / (most - least)) * (bottom - TOP);
    pen.textAlign = "right";
    yTicks.forEach((value, index) => {
      pen.fillStyle = line;
      pen.fillRect(left, Math.round(yOf(value)), right - left, 1);
      pen.fillStyle = weak;
      pen.fillText(labels[index], left - 6, yOf(value));
    });
    if (!this.data.x.length) {
      pen.textAlign = "center";
      pen.fillText("nothing yet", (left + right) / 2, (TOP + bottom) / 2);
      return;
    }
    const ticks = this.over === "time" ? timeTicks(from, to, right - left)
      : niceTicks(from, to, (right - left) / 56).filter(Number.isInteger).map((it) => [it, `v${it}`]);
    drawTimes(pen, ticks, xOf, left, right, this.over === "time" ? TOP : bottom, bottom);
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, right - left, bottom + 1);
    pen.clip();
    this.drawSeries(pen, heights, xOf, yOf, bottom, (right - left) / span);
    pen.restore();
    for (const [place, dashed] of [[this.at, true], [this.cursor === null ? null : this.data.x[this.cursor], false]]) {
      if (isKnown(place) && place >= from && place <= to) drawGuide(pen, xOf(place), dashed, TOP, bottom);
    }
  }

  drawSeries(pen, heights, xOf, yOf, bottom, wide) {
    const { x } = this.data;
    for (let index = heights.length - 1; index >= 0; index--) {
      pen.strokeStyle = pen.fillStyle = this.colour(index);
      if (this.kind === "bar") {
        const broad = Math.max(1, Math.min(24, wide * 0.7));
        heights[index].forEach((value, place) => {
          if (isKnown(value)) pen.fillRect(xOf(x[place]) - broad / 2, yOf(value), broad, bottom - yOf(value));
        });
        continue;
      }
      for (const [start, end] of stretches(heights[index])) {
        pen.beginPath();
        for (let place = start; place < end; place++) pen.lineTo(xOf(x[place]), yOf(heights[index][place]));
        if (this.kind === "band") {
          pen.lineTo(xOf(x[end - 1]), bottom);
          pen.lineTo(xOf(x[start]), bottom);
          pen.fill();
        } else if (end - start === 1) pen.fillRect(xOf(x[start]) - 1.5, yOf(heights[index][start]) - 1.5, 3, 3);
        else { pen.lineWidth = 1.5; pen.stroke(); pen.lineWidth = 1; }
      }
    }
  }

  colour(index) {
    return theme()[this.colours[index]] ?? this.colours[index];
  }

  nearest(offset) {
    let best = null, gap = Infinity;
    this.data.x.forEach((x, index) => {
      const here = Math.abs(this.xOf(x) - offset);
      if (here < gap) [gap, best] = [here, index];
    });
    return best;
  }

  told(index) {
    const x = this.data.x[index];
    if (x === undefined) return "nothing yet";
    const name = (series) => (this.names.length > 1 ? `${this.names[series]} ` : "");
    const values = this.data.lines.map((line, series) => name(series) + this.format(line[index]));
    return `${this.over === "time" ? clock(x) : `v${x}`}  ${values.join(" · ")}`;
  }

  point(index) {
    this.cursor = index;
    put(this.readout, index === null ? "" : this.told(index));
    this.draw();
  }

  onKey(event) {
    const last = this.data.x.length - 1, here = this.cursor ?? last;
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last, PageUp: here - 30, PageDown: here + 30 }[event.key];
    if (next === undefined || last < 0) return;
    this.point(Math.min(last, Math.max(0, next)));
    event.preventDefault();
  }
}

// The parts of a series where it is known: [start, end).
function stretches(values) {
  const made = [];
  let start = null;
  values.forEach((value, index) => {
    if (isKnown(value)) start ??= index;
    else if (start !== null) { made.push([start, index]); start = null; }
  });
  if (start !== null) made.push([start, values.length]);
  return made;
}
