// Colours: of versions, which the colour-blind can tell apart (after Okabe and Ito), and of the theme for canvases.
const VERSIONS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#c7b42c"];
export const UNKNOWN = "#8b949e";
export const versionColour = (version) => (Number.isInteger(version) && version >= 0 ? VERSIONS[version % VERSIONS.length] : UNKNOWN);
const DARK_ENOUGH = new Set(["#0072b2", "#009e73", "#d55e00"]);
export const inkOn = (colour) => (DARK_ENOUGH.has(colour) ? "#ffffff" : "#101418");

const NAMES = ["text", "weak", "line", "card", "good", "bad", "warn", "link"];
let known = null;
export function theme() {
  const style = known ? null : getComputedStyle(document.documentElement);
  return (known ??= Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])));
}
export function whenThemeChanges(call) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { known = null; call(); });
}

export const FONT = '11px Inter, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

// A canvas as large as it is laid out, emptied, in units of CSS pixels.
export function fitted(canvas, width = canvas.clientWidth, height = canvas.clientHeight) {
  const scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
  const wide = Math.round(width * scale), high = Math.round(height * scale);
  if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = FONT;
  pen.textBaseline = "middle";
  return pen;
}

// The text, in the middle shortened to what fits.
export function shortened(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let most = Math.min(text.length, Math.ceil(width / 4));
  const cut = () => text.slice(0, Math.ceil(most / 2)) + "…" + text.slice(text.length - Math.floor(most / 2));
  while (most > 2 && pen.measureText(cut()).width > width) most -= 1;
  return cut();
}
