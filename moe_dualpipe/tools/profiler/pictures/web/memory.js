// The memory of a device below its lanes: allocated as an area, reserved as a line. Each point holds until the next.
function bytesText(bytes) {
  const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, size]) => bytes >= size) || ["B", 1];
  return `${+(bytes / size).toPrecision(4)} ${unit}`;
}

function drawMemory() {
  const pen = $("lanes").getContext("2d");
  for (const { memory, memoryTop } of data.devices) {
    if (!memory) continue;
    const most = Math.max(...memory.allocated, ...memory.reserved, 1), bottom = memoryTop + MEMORY - 2;
    const yOf = (bytes) => bottom - bytes / most * (MEMORY - 6);
    const first = Math.max(firstIndex(0, memory.time.length, (i) => memory.time[i] > view.from) - 1, 0);
    const last = firstIndex(first, memory.time.length, (i) => memory.time[i] >= view.to);
    const stairs = (values) => {
      for (let i = first; i < last; i++) {
        const x = Math.max(xOf(memory.time[i]), LEFT), next = i + 1 < last ? xOf(memory.time[i + 1]) : LEFT + laneWidth();
        pen.lineTo(x, yOf(values[i]));
        pen.lineTo(Math.max(next, LEFT), yOf(values[i]));
      }
    };
    pen.fillStyle = theme.band;
    pen.fillRect(LEFT, memoryTop, laneWidth(), MEMORY);
    if (last > first) {
      pen.beginPath();
      pen.moveTo(Math.max(xOf(memory.time[first]), LEFT), bottom);
      stairs(memory.allocated);
      pen.lineTo(LEFT + laneWidth(), bottom);
      pen.fillStyle = "#77aadd";
      pen.fill();
      pen.strokeStyle = theme.ink;
      pen.lineWidth = 1;
      pen.beginPath();
      stairs(memory.reserved);
      if (memory.reserved.some(Boolean)) pen.stroke();  // a CPU reserves nothing
    }
    pen.fillStyle = theme.muted;
    pen.fillText("memory", 4, memoryTop + 12);
    pen.fillText(bytesText(most), 4, memoryTop + 28);
  }
}

// The memory at a point of the canvas as text, or null.
function memoryAt(x, y) {
  const device = data.devices.find((one) => one.memory && y >= one.memoryTop && y < one.memoryTop + MEMORY);
  if (!device || x < LEFT) return null;
  const { time, allocated, reserved } = device.memory;
  const at = firstIndex(0, time.length, (i) => time[i] > timeAt(x)) - 1;
  if (at < 0) return "memory: not recorded yet";
  const rest = reserved[at] ? `, ${bytesText(reserved[at])} reserved` : "";
  return `memory: ${bytesText(allocated[at])} allocated${rest}`;
}
