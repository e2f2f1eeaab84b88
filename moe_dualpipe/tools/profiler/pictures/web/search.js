// Search: pieces and runs of phases whose name has the text, or matches the expression. All hits are marked.
function testOf(text, regex) {
  if (regex) return ((expression) => (name) => expression.test(name))(new RegExp(text, "i"));
  const wanted = text.toLowerCase();
  return (name) => name.toLowerCase().includes(wanted);
}

function search() {
  const text = $("query").value;
  view.hits = null;
  $("hits").textContent = "";
  if (text) {
    try {
      const test = testOf(text, $("regex").checked), matching = names.map(test);
      view.hits = hitsOf(matching);
      tellHits();
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      $("hits").textContent = "not a regular expression";
    }
  }
  redraw();
}

function hitsOf(matching) {
  const list = [], pieces = data.devices.map(() => new Set()), runs = new Set();
  for (const device of data.devices) {
    for (const row of device.rows) {
      for (const [begin, stop] of row.runs) {
        if (!matching[phaseOf(device, begin)]) continue;
        runs.add(`${device.number}:${begin}`);
        for (let i = begin; i <= stop; i++) pieces[device.number].add(i);
        list.push(runIn(row, begin, stop));
      }
      for (let i = row.first; i < row.last; i++) {
        if (!matching[device.name[i]] || pieceHidden(device, i)) continue;
        pieces[device.number].add(i);
        list.push(pieceIn(row, i));
      }
    }
  }
  list.sort((a, b) => a.start - b.start || a.device.number - b.device.number);
  return { list, pieces, runs, at: -1 };
}

function tellHits() {
  const { list, at } = view.hits;
  const count = list.length.toLocaleString("en");
  $("hits").textContent = !list.length ? "no hit" : at < 0 ? `${count} hit${list.length > 1 ? "s" : ""}`
    : `${(at + 1).toLocaleString("en")} of ${count}`;
}

// Go to the next hit, or with -1 to the previous one. The first one is the first that is shown.
function step(by) {
  if (!view.hits || !view.hits.list.length) return;
  const { list, at } = view.hits, shown = list.findIndex((hit) => hit.stop > view.from);
  const start = by > 0 ? Math.max(shown, 0) : (shown < 0 ? list.length : shown) - 1;
  view.hits.at = ((at < 0 ? start : at + by) + list.length) % list.length;
  const hit = list[view.hits.at], length = hit.stop - hit.start, shownLength = view.to - view.from;
  if (length > shownLength || length / shownLength * laneWidth() < 4) showAround(hit.start, hit.stop, 4);
  else if (hit.start < view.from || hit.stop > view.to) {
    const middle = (hit.start + hit.stop) / 2;
    show(middle - shownLength / 2, middle + shownLength / 2);
  }
  tellHits();
  scrollToDevice(hit.device);
  pick(hit);
}

function listenToSearch() {
  $("query").addEventListener("input", search);
  $("regex").addEventListener("change", search);
  $("next").addEventListener("click", () => step(1));
  $("previous").addEventListener("click", () => step(-1));
  $("query").addEventListener("keydown", (event) => {
    if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
  });
}
