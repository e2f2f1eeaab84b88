// The keyboard, and the list of keys.
const KEYS = [
  [["ArrowLeft", "ArrowRight"], "\u2190 \u2192", "move (with Shift: a whole window)"],
  [["+", "=", "-"], "+ \u2212", "zoom in, zoom out"],
  [["0"], "0", "show all"],
  [["/"], "/", "search"],
  [["n", "N"], "n N", "next hit, previous hit"],
  [["Escape"], "Esc", "end the search, remove the marks"],
  [["?"], "?", "this list"],
];
const MOUSE = [
  ["wheel", "zoom (with Shift: move)"], ["drag", "move; in the strip of the whole time: move or change the frame"],
  ["click", "details of a piece of work; a cause: go there; the legend: hide or show"],
  ["double click", "show all; the legend: show only this"],
];

function react(event) {
  const shift = event.shiftKey ? 1 : 0.2;
  switch (event.key) {
    case "ArrowLeft": return pan(-shift), true;
    case "ArrowRight": return pan(shift), true;
    case "+": case "=": return zoom(1 / 1.5), true;
    case "-": return zoom(1.5), true;
    case "0": return showAll(), true;
    case "/": return $("query").focus(), $("query").select(), true;
    case "n": return step(1), true;
    case "N": return step(-1), true;
    case "?": return $("help").showModal(), true;
    default: return false;
  }
}

function clear() {
  $("query").value = "";
  $("query").blur();
  pick(null);
  goTo(null, null);
  search();
}

function listenToKeys() {
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    if (event.key === "Escape") return clear();
    if (event.target.id === "query") return;
    if (react(event)) event.preventDefault();
  });
  const table = element("table");
  for (const [keys, what] of [...KEYS.map(([, keys, what]) => [keys, what]), ...MOUSE]) {
    const line = element("tr");
    line.append(element("td", keys), element("td", what));
    table.append(line);
  }
  $("help").append(table);
  $("help").addEventListener("click", () => $("help").close());
  $("help-button").addEventListener("click", () => $("help").showModal());
}
