// Marks in the ribbon, told apart by shape as well as by colour; and their legend.
import { bare, byId, el } from "./dom.js";
import { fitted, theme } from "./palette.js";

const path = (pen, points) => {
  pen.beginPath();
  points.forEach(([x, y]) => pen.lineTo(x, y));
  pen.closePath();
};
const cross = (pen, x, y, r) => {
  pen.beginPath();
  for (const [dx, dy] of [[-1, -1], [1, -1]]) { pen.moveTo(x + dx * r, y + dy * r); pen.lineTo(x - dx * r, y - dy * r); }
};

const triangle = (pen, x, y, r) =>
  path(pen, [[x, y - r * 1.2], [x + r * 1.15, y + r * 0.9], [x - r * 1.15, y + r * 0.9]]);
const diamond = (pen, x, y, r) =>
  path(pen, [[x, y - r * 1.2], [x + r * 1.2, y], [x, y + r * 1.2], [x - r * 1.2, y]]);

// kind: its words, its colour in the theme, and its shape around (x, y) with radius r. open: only its outline.
export const glyphs = bare({
  sync: { told: "sync verified", colour: "text", shape: (pen, x, y, r) => { pen.beginPath(); pen.arc(x, y, r * 0.65, 0, 7); } },
  join: { told: "joined", colour: "good", shape: (pen, x, y, r) => path(pen, [[x - r, y - r], [x + r, y], [x - r, y + r]]) },
  leave: { told: "left", colour: "weak", shape: (pen, x, y, r) => path(pen, [[x + r, y - r], [x - r, y], [x + r, y + r]]) },
  stall: { told: "stalled", colour: "warn", shape: triangle },
  fault: { told: "fault", colour: "bad", shape: diamond },
  death: { told: "died", colour: "bad", shape: cross, open: true },
});

export function drawGlyph(pen, kind, x, y, high) {
  const glyph = glyphs[kind] ?? glyphs.fault, colours = theme(), r = high >= 20 ? 5 : high >= 14 ? 4 : 2.5;
  if (kind === "sync" && high < 14) return;  // a change of colour shows it; dots on thin lanes would hide them
  glyph.shape(pen, x, y, r);
  pen.lineJoin = "round";
  pen.strokeStyle = colours.card;
  pen.lineWidth = glyph.open ? 5 : 2.5;
  pen.stroke();
  if (glyph.open) {
    pen.strokeStyle = colours[glyph.colour];
    pen.lineWidth = 2.2;
    pen.stroke();
  } else {
    pen.fillStyle = colours[glyph.colour];
    pen.fill();
  }
  pen.lineWidth = 1;
}

export function showLegend(changed) {
  if (changed) return;
  const made = Object.entries(glyphs).map(([kind, { told }]) => [kind, told, el("canvas", { "aria-hidden": "true", class: "glyph" })]);
  byId("glyphs").replaceChildren(...made.map(([, told, canvas]) => el("span", { class: "key", role: "listitem" }, canvas, told)));
  for (const [kind, , canvas] of made) drawGlyph(fitted(canvas, 16, 16), kind, 8, 8, 20);
}
