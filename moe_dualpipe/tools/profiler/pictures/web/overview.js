// The strip of the whole time: computation and copies above, communication below, and a frame around the shown part.
const STRIP = 46, EDGE = 6;
let density = null;

const overviewX = (time) => LEFT + time / end * laneWidth();
const overviewTime = (x) => Math.min(Math.max((x - LEFT) / laneWidth(), 0), 1) * end;

// How long each style runs in each of the columns, for computation and copies, and for communication, if there is any.
function densityOf(columns) {
  const found = [0, 1].map(() => styles.map(() => new Float32Array(columns)));
  const add = (sums, from, to) => {
    const a = from / end * columns, b = to / end * columns;
    for (let c = Math.max(Math.floor(a), 0); c < Math.min(b, columns); c++) {
      sums[c] += Math.min(b, c + 1) - Math.max(a, c);
    }
  };
  for (const device of data.devices) {
    for (let i = 0; i < device.start.length; i++) {
      add(found[+(device.lane[i] === COMMUNICATION)][device.style[i]], device.start[i], stopOf(device, i));
    }
    for (const [from, to] of device.exposed) add(found[1][data.exposed], from, to);
  }
  const exposed = found[1][data.exposed];
  if (!data.strip) found[1][data.hidden].forEach((time, c, sums) => { sums[c] = Math.max(time - exposed[c], 0); });
  return found.filter((part) => part.some((sums) => sums.some(Boolean)));
}

function drawOverview() {
  const pen = penOf($("overview"), STRIP), columns = Math.max(Math.floor(laneWidth()), 1);
  if (!end) return;
  if (density === null || density.columns !== columns) density = { columns, sums: densityOf(columns) };
  const parts = density.sums, part = (STRIP - 8) / parts.length, above = data.strip ? data.exposed : -1;
  parts.forEach((sums, number) => {
    const bottom = 6 + part * (number + 1);
    for (let c = 0; c < columns; c++) {
      const all = sums.reduce((sum, times, style) => sum + (style === above ? 0 : times[c]), 0);
      const scale = (part - 2) / Math.max(all, data.devices.length);  // work of several streams at once fills the strip
      let y = bottom;
      sums.forEach((times, style) => {
        if (styleHidden(style) || style === above) return;
        const tall = times[c] * scale;
        if (tall < 0.1) return;
        pen.fillStyle = styles[style][1];
        pen.fillRect(LEFT + c, y - tall, 1, tall);
        y -= tall;
      });
      if (above < 0 || styleHidden(above) || !sums[above][c]) continue;
      pen.fillStyle = styles[above][1];
      pen.fillRect(LEFT + c, bottom - sums[above][c] * scale, 1, sums[above][c] * scale);
    }
  });
  drawOverviewMarks(pen);
}

function drawOverviewMarks(pen) {
  pen.fillStyle = theme.mark;
  const columns = new Set((view.hits ? view.hits.list : []).map(({ start }) => Math.floor(overviewX(start))));
  for (const column of columns) pen.fillRect(column, 0, 1, 5);
  for (const device of data.devices) {
    for (const { start, end: stop } of device.verdicts) {
      pen.fillStyle = styles[data.exposed][1];
      pen.fillRect(overviewX(start) - 1, 0, Math.max(overviewX(stop) - overviewX(start), 3), 3);
    }
  }
  const a = overviewX(view.from), b = overviewX(view.to);
  pen.globalAlpha = 0.65;
  pen.fillStyle = theme.paper;
  pen.fillRect(LEFT, 5, a - LEFT, STRIP - 5);
  pen.fillRect(b, 5, LEFT + laneWidth() - b, STRIP - 5);
  pen.globalAlpha = 1;
  pen.strokeStyle = theme.mark;
  pen.lineWidth = 1;
  pen.strokeRect(Math.min(a, LEFT + laneWidth() - 4) + 0.5, 5.5, Math.max(b - a, 4) - 1, STRIP - 7);
  pen.fillStyle = theme.muted;
  pen.fillText("whole time", 4, STRIP / 2);
}

// What the mouse would drag at x: an edge of the frame, the frame, or a new frame.
function gripAt(x) {
  const a = overviewX(view.from), b = overviewX(view.to);
  if (Math.abs(x - a) <= EDGE && Math.abs(x - a) <= Math.abs(x - b)) return "from";
  if (Math.abs(x - b) <= EDGE) return "to";
  return x > a && x < b && b - a < laneWidth() - 1 ? "frame" : "new";
}

function listenToOverview() {
  const canvas = $("overview");
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { grip: gripAt(event.offsetX), x: event.offsetX, from: view.from, to: view.to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const cursors = { from: "ew-resize", to: "ew-resize", frame: "grab", new: "crosshair" };
    canvas.style.cursor = cursors[drag ? drag.grip : gripAt(event.offsetX)];
    if (!drag) return;
    const time = overviewTime(event.offsetX), by = (event.offsetX - drag.x) / laneWidth() * end;
    if (drag.grip === "frame") show(drag.from + by, drag.to + by);
    else if (drag.grip === "from") show(Math.min(time, drag.to - SHORTEST), drag.to);
    else if (drag.grip === "to") show(drag.from, Math.max(time, drag.from + SHORTEST));
    else if (Math.abs(event.offsetX - drag.x) > 3) {
      const other = overviewTime(drag.x);
      show(Math.min(time, other), Math.max(time, other));
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && drag.grip === "new" && Math.abs(event.offsetX - drag.x) <= 3) {
      const half = (view.to - view.from) / 2, time = overviewTime(event.offsetX);
      show(time - half, time + half);
    }
    drag = null;
  });
}
