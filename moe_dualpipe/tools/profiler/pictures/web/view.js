// The part of the time that is shown, and what is chosen. Everything that changes it asks for a new picture.
const LEFT = 112, RIGHT = 12, SHORTEST = 0.05;
const view = { from: 0, to: end, picked: null, verdict: null, hidden: new Set(), hits: null };
const $ = (id) => document.getElementById(id);
const painters = [];  // functions that draw one part of the page
let asked = false;

function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; for (const paint of painters) paint(); });
}

function show(from, to) {
  const length = Math.min(Math.max(to - from, SHORTEST), end);
  view.from = Math.min(Math.max(from, 0), end - length);
  view.to = view.from + length;
  $("range").textContent = `${timeText(view.from, length)} to ${timeText(view.to, length)} (${spanText(length)})`;
  redraw();
}

const showAll = () => show(0, end);
const pan = (share) => { const by = (view.to - view.from) * share; show(view.from + by, view.to + by); };

function zoom(factor, at = (view.from + view.to) / 2) {
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

// Show an interval with some time around it.
function showAround(from, to, share = 0.5) {
  const around = Math.max((to - from) * share, SHORTEST);
  show(from - around, to + around);
}

const UNITS = [["s", 1e6], ["ms", 1e3], ["us", 1]];

// A point in time, with as many digits as tell points apart in a window of this length.
function timeText(time, length) {
  const [unit, size] = UNITS.find(([, size]) => Math.max(length, Math.abs(time) / 1000) >= size) || UNITS[2];
  const digits = Math.min(Math.max(0, Math.ceil(-Math.log10(length / size / 1000))), 6);
  return `${(time / size).toFixed(digits)} ${unit}`;
}

// A duration with four significant digits.
function spanText(time) {
  const [unit, size] = UNITS.find(([, size]) => time >= size) || UNITS[2];
  const value = time / size;
  return `${value >= 1000 ? Math.round(value).toLocaleString("en") : +value.toPrecision(4)} ${unit}`;
}
