// The time above the lanes: ticks at 1, 2 or 5 times a power of ten, with labels that do not touch.
function drawRuler() {
  const pen = penOf($("ruler"), 20), length = view.to - view.from, most = Math.max(Math.floor(laneWidth() / 90), 1);
  const power = 10 ** Math.floor(Math.log10(length / most || 1));
  const step = [1, 2, 5, 10].map((times) => times * power).find((wide) => length / wide <= most) || 10 * power;
  for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
    const x = xOf(k * step);
    pen.fillStyle = theme.line;
    pen.fillRect(x, 12, 1, 8);
    pen.fillStyle = theme.muted;
    const text = tickText(k * step, step, view.to);
    if (x + widthOf(pen, text) + 3 < LEFT + laneWidth() + RIGHT) pen.fillText(text, x + 3, 9);
  }
}

// All ticks have the unit of the window's end, and the digits of their distance.
function tickText(time, step, last) {
  const [unit, size] = UNITS.find(([, size]) => last >= size) || UNITS[2];
  const digits = Math.min(Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9)), 9);
  return `${(time / size).toFixed(digits)} ${unit}`;
}
