// The page's data: devices with columns of numbers, and rows that say which pieces lie beside each other.
const data = JSON.parse(document.getElementById("data").textContent);
const { names, short, styles, end } = data;

// A row: the pieces from `first` to before `last`, sorted by start. reach: the latest end up to each piece.
function rowsOf(device) {
  const rows = [];
  let row = null;
  for (let i = 0; i < device.start.length; i++) {
    if (!row || device.lane[i] !== row.lane || device.row[i] !== row.row) {
      row = { device, lane: device.lane[i], row: device.row[i], first: i, last: i, phases: false };
      rows.push(row);
    }
    row.last = i + 1;
    row.phases ||= device.phases[device.phase[i]] >= 0;
    const before = i > row.first ? device.reach[i - 1] : -Infinity;
    device.reach[i] = Math.max(before, device.start[i] + device.length[i]);
  }
  return rows;
}

// The runs of a row: neighbors of one phase, as [first piece, last piece]. Pieces without a phase are in no run.
function runsOf(row) {
  const { phase, phases } = row.device, runs = [];
  for (let i = row.first; i < row.last; i++) {
    if (phases[phase[i]] < 0) continue;
    const run = runs[runs.length - 1];
    if (run && run[1] === i - 1 && phase[i] === phase[i - 1]) run[1] = i;
    else runs.push([i, i]);
  }
  return runs;
}

for (const [number, device] of data.devices.entries()) {
  device.number = number;
  for (const column of ["start", "length"]) device[column] = Float64Array.from(device[column]);
  device.reach = new Float64Array(device.start.length);
  device.rows = rowsOf(device);
  for (const row of device.rows) row.runs = runsOf(row);
}

const stopOf = (device, i) => device.start[i] + device.length[i];
const countOf = (device, i) => device.count ? device.count[i] : 1;
const phaseOf = (device, i) => device.phases[device.phase[i]];

// What can be picked: a piece, or a run of pieces of one phase.
const pieceIn = (row, i) => (
  { row, device: row.device, piece: i, run: false, start: row.device.start[i], stop: stopOf(row.device, i) });
const runIn = (row, begin, last) => (
  { row, device: row.device, piece: begin, run: true, start: row.device.start[begin], stop: stopOf(row.device, last) });
const nameOf = ({ device, piece, run }) => run ? phaseOf(device, piece) : device.name[piece];

// The first index from `low` to before `high` for which `test` is true; `high` if there is none.
function firstIndex(low, high, test) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (test(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

// The pieces of a row that may be visible between two times, as [first, last).
const visible = ({ device, first, last }, from, to) => [
  firstIndex(first, last, (i) => device.reach[i] > from), firstIndex(first, last, (i) => device.start[i] >= to),
];
