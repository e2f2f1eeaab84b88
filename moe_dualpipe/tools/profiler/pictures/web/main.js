// Join the parts: who draws, and what the mouse does in the lanes.
function listenToLanes() {
  const canvas = $("lanes");
  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey) pan((event.deltaX || event.deltaY) * unit / 800);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX * unit / 800);
    else zoom(Math.exp(event.deltaY * unit / 400), timeAt(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, y: event.offsetY, from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return showTip(event);
    drag.moved ||= Math.abs(event.offsetX - drag.x) > 3;
    if (!drag.moved) return;
    hideTip();
    canvas.classList.add("dragging");
    const by = (event.offsetX - drag.x) / laneWidth() * (drag.to - drag.from);
    show(drag.from - by, drag.to - by);
  });
  canvas.addEventListener("pointerup", (event) => {
    canvas.classList.remove("dragging");
    if (drag && !drag.moved) pick(pieceAt(event.offsetX, event.offsetY));
    drag = null;
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("dblclick", showAll);
}

painters.push(drawOverview, drawRuler, drawLanes, drawMemory);
readTheme();
fillLegend();
fillVerdicts();
listenToOverview();
listenToSearch();
listenToKeys();
listenToLanes();
$("all").addEventListener("click", showAll);
$("notes").textContent = data.notes.join("; ");
for (const id of ["lanes", "overview"]) new ResizeObserver(redraw).observe($(id));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); redraw(); });
showAll();
