// Draws the lanes of page.py on a canvas, and zooms and moves them.
const { end, rows } = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("lanes"), info = document.getElementById("info");
const HEIGHT = 44, TITLE = 26, LEFT = 110, AXIS = 26, LANES = ["computation", "communication"];
let from = 0, to = end, drag = null;

const width = () => canvas.clientWidth - LEFT;
const x = (time) => LEFT + (time - from) / (to - from) * width();
const timeAt = (pixel) => from + (pixel - LEFT) / width() * (to - from);
const y = (row, lane) => row * (TITLE + 2 * HEIGHT) + TITLE + lane * HEIGHT;

function draw() {
  const scale = window.devicePixelRatio || 1, height = y(rows.length, 0) - TITLE + AXIS;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  rows.forEach((row, r) => {
    pen.fillStyle = "#222";
    pen.fillText(row.title, LEFT, y(r, 0) - TITLE / 2);
    LANES.forEach((lane, l) => pen.fillText(lane, 4, y(r, l) + HEIGHT / 2));
    for (const [lane, name, colour, spans] of row.blocks) {
      let widest = [0, 0];
      for (const [start, stop] of spans) {
        if (stop < from || start > to) continue;
        const a = Math.max(x(start), LEFT), b = Math.min(x(stop), LEFT + width());
        pen.fillStyle = colour;
        pen.fillRect(a, y(r, lane) + 2, Math.max(b - a, 0.5), HEIGHT - 4);
        if (b - a > widest[1] - widest[0]) widest = [a, b];
      }
      if (name && pen.measureText(name).width < widest[1] - widest[0] - 4) {
        pen.fillStyle = "#222";
        pen.fillText(name, widest[0] + 3, y(r, lane) + HEIGHT / 2);
      }
    }
  });
  const step = 10 ** Math.floor(Math.log10((to - from) / 4));
  const digits = Math.max(0, 3 - Math.floor(Math.log10(step)));
  pen.fillStyle = "#666";
  for (let time = Math.ceil(from / step) * step; time <= to; time += step * Math.ceil((to - from) / step / 12)) {
    pen.fillRect(x(time), height - AXIS, 1, 5);
    pen.fillText((time / 1000).toFixed(digits) + " ms", x(time) + 3, height - AXIS / 2);
  }
}

function showInfo(event) {
  const time = timeAt(event.offsetX), row = rows.findIndex((_, r) => event.offsetY < y(r + 1, 0) - TITLE);
  const lane = row < 0 ? -1 : Math.floor((event.offsetY - y(row, 0)) / HEIGHT);
  info.textContent = (time / 1000).toFixed(3) + " ms";
  for (const [l, name, , spans] of row < 0 ? [] : rows[row].blocks) {
    const span = l === lane && spans.find(([start, stop]) => start <= time && time < stop);
    if (span) {
      const all = spans.reduce((sum, [start, stop]) => sum + stop - start, 0);
      info.textContent += `   ${name || "(no annotation)"}: ${all.toFixed(1)} us in ${spans.length} piece`
        + (spans.length > 1 ? "s" : "") + `, this one ${(span[1] - span[0]).toFixed(1)} us`;
    }
  }
}

function show(start, stop) {
  const length = Math.min(Math.max(stop - start, 0.1), end);
  from = Math.min(Math.max(start, 0), end - length);
  to = from + length;
  draw();
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const time = timeAt(event.offsetX), factor = Math.exp(event.deltaY / 400);
  show(time - (time - from) * factor, time + (to - time) * factor);
}, { passive: false });
canvas.addEventListener("mousedown", (event) => { drag = { at: event.offsetX, from, to }; });
window.addEventListener("mouseup", () => { drag = null; });
canvas.addEventListener("mousemove", (event) => {
  if (drag) {
    const moved = (event.offsetX - drag.at) / width() * (drag.to - drag.from);
    show(drag.from - moved, drag.to - moved);
  }
  showInfo(event);
});
canvas.addEventListener("dblclick", () => show(0, end));
window.addEventListener("resize", draw);
draw();
