// The verdicts beside the lanes. A click shows the place that a verdict means, and marks it.
function fillVerdicts() {
  const panel = $("verdicts");
  for (const device of data.devices) {
    if (!device.verdicts.length) continue;
    const heading = data.devices.length > 1 ? `Causes: ${device.title.split(":")[0]}` : "Causes";
    panel.append(element("h2", heading));
    device.verdicts.forEach((verdict) => panel.append(verdictBox(device, verdict)));
  }
  panel.hidden = !panel.children.length;
}

function verdictBox(device, verdict) {
  const box = element("div", "", "verdict");
  box.tabIndex = 0;
  box.setAttribute("role", "button");
  box.append(element("b", `${verdict.title.replace(/\.$/, "")} (${verdict.kind})`));
  const percent = verdict.fraction === null ? "" : ` (${(100 * verdict.fraction).toFixed(1)}%)`;
  box.append(element("div", verdict.gain === null ? `costs ${spanText(verdict.cost)}; the gain cannot be predicted`
    : `costs ${spanText(verdict.cost)}; predicted gain ${spanText(verdict.gain)}${percent}`, "muted"));
  for (const sentence of verdict.evidence) box.append(element("p", sentence));
  if (verdict.place) box.append(element("p", `Where: ${verdict.place}`));
  box.append(element("p", verdict.remedy));
  const go = () => goTo({ ...verdict, device }, box);
  box.addEventListener("click", go);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();  // the space bar would scroll
    go();
  });
  return box;
}

function goTo(verdict, box) {
  for (const other of document.querySelectorAll(".verdict")) other.setAttribute("aria-current", String(other === box));
  view.verdict = verdict;
  if (verdict) {
    showAround(verdict.start, verdict.end);
    scrollToDevice(verdict.device);
  }
  redraw();
}

// Scroll so far that the lanes of this device are in the window.
function scrollToDevice(device) {
  const top = $("lanes").getBoundingClientRect().top + device.top, head = document.querySelector("header").offsetHeight;
  const least = head, most = window.innerHeight - Math.min(device.bottom - device.top, window.innerHeight - head);
  if (top < least || top > most) window.scrollBy(0, top - least);
}
