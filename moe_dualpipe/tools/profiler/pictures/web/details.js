// What is under the mouse, in a tip, and what was clicked, below the lanes. Names are set as text, never as markup.
function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

// The facts about a piece or a run: [what, value] in the order in which they are shown.
function factsOf(found) {
  const { device, start, stop, run } = found, facts = run ? [["category", "phase"]] : categoryOf(found);
  facts.push(["start", timeText(start, 1)], ["duration", spanText(stop - start)]);
  if (!run) facts.push(...moreOf(found));
  if (data.devices.length > 1) facts.push(["device", device.title.split(":")[0]]);
  return facts;
}

function categoryOf({ device, piece: i }) {
  const count = countOf(device, i), phase = phaseOf(device, i), facts = [["category", styles[device.style[i]][0]]];
  if (phase >= 0) facts.push(["phase", names[phase]]);
  if (count > 1) facts.push(["events", `${count}, ${spanText(device.busy[i])} in all; the longest is named`]);
  return facts;
}

function moreOf({ device, piece: i }) {
  const facts = [], detail = device.detail ? device.detail[i] : -1;
  if (device.lane[i] === COMMUNICATION) facts.push(["exposed", spanText(exposedIn(device, i))]);
  if (detail >= 0) facts.push(...data.details[detail]);
  return [...facts, ["stream", names[device.stream[i]]]];
}

function exposedIn(device, i) {
  const spans = device.exposed, stop = stopOf(device, i);
  let sum = 0;
  for (let at = firstIndex(0, spans.length, (k) => spans[k][1] > device.start[i]); at < spans.length; at++) {
    if (spans[at][0] >= stop) break;
    sum += Math.min(spans[at][1], stop) - Math.max(spans[at][0], device.start[i]);
  }
  return sum;
}

function showTip(event) {
  const tip = $("tip"), found = pieceAt(event.offsetX, event.offsetY);
  const memory = found ? null : memoryAt(event.offsetX, event.offsetY);
  tip.hidden = !found && memory === null;
  if (tip.hidden) return;
  tip.replaceChildren();
  if (found) {
    tip.append(element("b", short[nameOf(found)]));
    for (const [what, value] of factsOf(found)) tip.append(element("div", `${what}: ${value}`));
  } else tip.append(memory);
  const { innerWidth, innerHeight } = window, { offsetWidth, offsetHeight } = tip;
  tip.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - offsetWidth - 4), 0)}px`;
  const below = event.clientY + 14;
  tip.style.top = `${below + offsetHeight > innerHeight ? Math.max(event.clientY - offsetHeight - 8, 0) : below}px`;
}

const hideTip = () => { $("tip").hidden = true; };

function pick(found) {
  view.picked = found;
  const panel = $("details");
  panel.hidden = !found;
  panel.replaceChildren();
  if (found) {
    panel.append(element("div", names[nameOf(found)], "name"));
    for (const [what, value] of factsOf(found)) {
      const fact = element("div");
      fact.append(element("span", `${what} `), value);
      panel.append(fact);
    }
  }
  redraw();
}
