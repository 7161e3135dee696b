// The slider over a finished run: the page as it was at a time.
import { byId, moment, put } from "./dom.js";
import { past } from "./source.js";

// end: the state of the end. show: called with the state at a time, that time, or null at the end, and a problem's text.
export function startHistory(end, show) {
  const slider = byId("history-at"), from = end.began, to = end.ended ?? end.at, at = past();
  let asking = false, wanted = null;
  const told = () => {
    const text = moment(Number(slider.value), -1);
    put(byId("history-told"), text);
    slider.setAttribute("aria-valuetext", text);
  };
  // One question at a time: while one is under way only the last wish is kept.
  const ask = async () => {
    told();
    wanted = Number(slider.value);
    if (asking) return;
    asking = true;
    while (wanted !== null) {
      const time = wanted;
      wanted = null;
      try {
        show(time >= to ? end : await at(time), time >= to ? null : time, "");
      } catch (error) {
        show(null, time, error.message);
      }
    }
    asking = false;
  };
  Object.assign(slider, { min: from, max: to, step: Math.max(0.001, (to - from) / 1000), value: to });
  slider.addEventListener("input", ask);
  byId("history-end").addEventListener("click", () => { slider.value = to; ask(); });
  byId("history").addEventListener("submit", (event) => event.preventDefault());
  byId("history").hidden = false;
  told();
}
