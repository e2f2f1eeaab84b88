// The lanes: pieces of work, labels at every zoom, and what is marked.
const TITLE = 24, BAND = 14, GAP = 4, MEMORY = 52;
const FEW = data.devices.length <= 2;
const BODY = FEW ? [44, 44, 22] : [30, 30, 16];  // the height of a single row of each lane
const NARROW = FEW ? 26 : 19;  // the height of one of several rows
const COMMUNICATION = 1;
const USED = [0, 1, 2].filter((lane) => data.devices.some(({ rows }) => rows.some((row) => row.lane === lane)));

// Where everything is: each row, title and memory panel gets its `top`. Returns the height of all.
function arrange() {
  let y = 0;
  for (const device of data.devices) {
    device.top = y;
    y += TITLE;
    device.bands = [];
    for (const lane of USED) {
      const rows = device.rows.filter((row) => row.lane === lane), top = y;
      for (const row of rows) {
        row.top = y;
        row.body = rows.length > 1 ? Math.min(NARROW, BODY[lane]) : BODY[lane];
        row.band = row.phases ? BAND : 0;
        y += row.band + row.body + 1;
      }
      if (!rows.length) y += BODY[lane];
      device.bands.push({ lane, top, height: y - top });
      y += GAP;
    }
    device.memoryTop = y;
    if (device.memory) y += MEMORY + GAP;
    device.bottom = y;
    y += 6;
  }
  return y;
}

const faded = (device, i) => view.hits !== null && !view.hits.pieces[device.number].has(i);
const styleHidden = (style) => view.hidden.has(style);
// Without a strip, a transfer has two styles: that of its hidden part, which is its own, and that of its exposed part.
const pieceHidden = (device, i) => styleHidden(device.style[i])
  && (data.strip || device.lane[i] !== COMMUNICATION || styleHidden(data.exposed));

function drawLanes() {
  const canvas = $("lanes"), height = arrange(), pen = penOf(canvas, height);
  for (const device of data.devices) {
    pen.fillStyle = theme.ink;
    pen.fillText(fitting(pen, device.title, canvas.clientWidth - 8), 4, device.top + TITLE / 2);
    for (const { lane, top, height } of device.bands) {
      pen.fillStyle = theme.muted;
      pen.fillText(data.lanes[lane], 4, top + height / 2);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, device.top, laneWidth(), device.bottom - device.top);
    pen.clip();
    for (const row of device.rows) drawRow(pen, row);
    pen.restore();
  }
  drawMarks(pen);
}

function drawRow(pen, row) {
  const [first, last] = visible(row, view.from, view.to);
  drawPieces(pen, row, first, last);
  if (row.lane === COMMUNICATION && !(data.strip && styleHidden(data.exposed))) drawExposed(pen, row, first, last);
  pen.font = "11px system-ui, sans-serif";
  drawLabels(pen, row, first, last);
  if (row.band) drawBand(pen, row);
  pen.font = "12px system-ui, sans-serif";
}

// Pieces narrower than a pixel are collected: a pixel shows the style with the most time, paler if the row is idle.
// If red is not a strip, their exposed time is drawn here too: as high as its share.
function drawPieces(pen, row, first, last) {
  const { device, top, body, band } = row, y = top + band, apart = row.lane === COMMUNICATION && !data.strip;
  let pixel = -1, times = new Map(), red = 0;
  const flush = () => {
    let style = -1, all = 0;
    for (const [key, time] of times) { all += time; if (style < 0 || time > times.get(style)) style = key; }
    const tall = all ? body * red / all : 0;
    pen.globalAlpha = Math.min(1, Math.max(all, 0.15));
    if (all) fill(pen, style, pixel, y, 1, body - tall);
    if (tall) fill(pen, data.exposed, pixel, y + body - tall, 1, tall);
    [times, red] = [new Map(), 0];
  };
  for (let i = first; i < last; i++) {
    const a = Math.max(xOf(device.start[i]), LEFT), b = Math.min(xOf(stopOf(device, i)), LEFT + laneWidth());
    const style = device.style[i];
    if (b < a || pieceHidden(device, i)) continue;
    const alpha = faded(device, i) ? 0.25 : 1;
    if (b - a < 1) {
      if (Math.floor(a) !== pixel) { flush(); pixel = Math.floor(a); }
      const time = Math.max(b - a, 0.15) * alpha;
      times.set(style, (times.get(style) || 0) + time);
      if (apart && device.length[i]) red += time * exposedIn(device, i) / device.length[i];
      continue;
    }
    pen.globalAlpha = alpha;
    fill(pen, style, a, y, b - a > 3 ? b - a - 0.5 : b - a, body);
  }
  flush();
  pen.globalAlpha = 1;
}

function fill(pen, style, x, y, width, height) {
  if (styleHidden(style)) return;
  pen.fillStyle = styles[style][1];
  pen.fillRect(x, y, width, height);
}

// Exposed communication: all of the row in red, or a strip below colors that mean phases. Of spans below a pixel,
// a pixel shows the share of its time.
function drawExposed(pen, row, first, last) {
  const { device, top, body, band } = row, spans = device.exposed;
  const height = data.strip ? 5 : body, y = top + band + body - height;
  let at = firstIndex(0, spans.length, (i) => spans[i][1] > view.from), done = -Infinity, pixel = -1, share = 0;
  pen.fillStyle = styleHidden(data.exposed) ? theme.paper : styles[data.exposed][1];
  const flush = () => {
    pen.globalAlpha = Math.min(share, 1);
    if (share) pen.fillRect(pixel, y, 1, height);
    share = 0;
  };
  for (let i = first; i < last && at < spans.length; i++) {
    const start = Math.max(device.start[i], done), stop = stopOf(device, i);
    if (pieceHidden(device, i) || (!data.strip && xOf(stop) - xOf(device.start[i]) < 1)) continue;
    while (at > 0 && spans[at - 1][1] > start) at--;
    for (; at < spans.length && spans[at][0] < stop; at++) {
      const from = Math.max(spans[at][0], start, view.from), to = Math.min(spans[at][1], stop, view.to);
      if (to <= from) continue;
      const x = xOf(from), width = xOf(to) - x, alpha = faded(device, i) ? 0.25 : 1;
      if (width < 1) {
        if (Math.floor(x) !== pixel) { flush(); pixel = Math.floor(x); }
        share += width * alpha;
      } else {
        pen.globalAlpha = alpha;
        pen.fillRect(x, y, width, height);
      }
    }
    done = Math.max(done, stop);
  }
  flush();
  pen.globalAlpha = 1;
}

// Labels inside pieces that are wide enough. Neighbors with one name share a label if they touch on the screen.
function drawLabels(pen, row, first, last) {
  const { device, top, body, band } = row;
  for (let i = first; i < last; i++) {
    const name = device.name[i], begin = i;
    while (i + 1 < last && device.name[i + 1] === name && device.style[i + 1] === device.style[i]
           && (device.start[i + 1] - stopOf(device, i)) / (view.to - view.from) * laneWidth() < 1
           && device.length[i] / (view.to - view.from) * laneWidth() < 24) i++;
    const style = device.style[i];
    if (styleHidden(style) || faded(device, begin)) continue;
    const a = Math.max(xOf(device.start[begin]), LEFT), b = Math.min(xOf(stopOf(device, i)), LEFT + laneWidth());
    const text = b - a < 20 ? "" : fitting(pen, short[name], b - a - 6);
    if (!text) continue;
    pen.fillStyle = styles[style][2];
    pen.fillText(text, a + 3, top + band + body / 2);
  }
}

// The band above a row names the phases.
function drawBand(pen, row) {
  const { device, top, runs } = row;
  const low = firstIndex(0, runs.length, (r) => device.reach[runs[r][1]] > view.from);
  let drawn = -1;
  for (let r = low; r < runs.length && device.start[runs[r][0]] < view.to; r++) {
    const [begin, stop] = runs[r];
    const a = Math.max(xOf(device.start[begin]), LEFT), b = Math.min(xOf(stopOf(device, stop)), LEFT + laneWidth());
    if (b - a < 1 && Math.floor(a) === drawn) continue;
    drawn = Math.floor(a);
    const hit = view.hits !== null && view.hits.runs.has(`${device.number}:${begin}`);
    pen.fillStyle = hit ? theme.mark : theme.band;
    pen.fillRect(a, top, Math.max(b - a - 1, 0.5), BAND - 2);
    const text = b - a < 20 ? "" : fitting(pen, names[phaseOf(device, begin)], b - a - 5);
    pen.fillStyle = hit ? theme.paper : theme.ink;
    if (text) pen.fillText(text, a + 2, top + BAND / 2 - 0.5);
  }
}

// Frames around what was clicked or found, and around the place of a verdict.
function drawMarks(pen) {
  pen.lineWidth = 2;
  pen.strokeStyle = theme.mark;
  const frame = (from, to, top, bottom) => {
    const a = Math.max(xOf(from), LEFT - 4), b = Math.min(xOf(to), LEFT + laneWidth() + 4);
    if (b >= LEFT && a <= LEFT + laneWidth()) pen.strokeRect(a, top, Math.max(b - a, 2), bottom - top);
  };
  if (view.picked) {
    const { row, run, start, stop } = view.picked;
    frame(start, stop, row.top + (run ? 0 : row.band), row.top + row.band + row.body);
  }
  if (view.verdict) {
    const { device, start, end } = view.verdict;
    pen.setLineDash([6, 4]);
    frame(start, end, device.top + TITLE - 3, device.bottom);
    pen.setLineDash([]);
  }
}

// The piece at a point of the canvas, or the run if the point is in the band above a row; null if there is none.
// A narrow piece may be two pixels away.
function pieceAt(x, y) {
  if (x < LEFT) return null;
  const near = 2 * (view.to - view.from) / laneWidth(), time = timeAt(x);
  for (const device of data.devices) {
    const row = device.rows.find(({ top, band, body }) => y >= top && y < top + band + body);
    if (row) return y < row.top + row.band ? runAt(row, time) : nearestPiece(row, time, near);
  }
  return null;
}

function runAt(row, time) {
  const { reach } = row.device, at = firstIndex(0, row.runs.length, (r) => reach[row.runs[r][1]] > time);
  const found = at < row.runs.length ? runIn(row, ...row.runs[at]) : null;
  return found && found.start <= time && time < found.stop ? found : null;
}

function nearestPiece(row, time, near) {
  const { device } = row, [first, last] = visible(row, time - near, time + near);
  let best = -1, least = Infinity;
  for (let i = first; i < last; i++) {
    const away = Math.max(device.start[i] - time, time - stopOf(device, i), 0);
    if (!pieceHidden(device, i) && away <= near && away <= least) { best = i; least = away; }
  }
  return best < 0 ? null : pieceIn(row, best);
}
