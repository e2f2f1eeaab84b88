// The legend: a button for each style that is drawn. A click hides what has this style, another one shows it again.
function usedStyles() {
  const used = new Set();
  for (const device of data.devices) {
    for (const [i, style] of device.style.entries()) {
      if (style !== data.hidden || exposedIn(device, i) < device.length[i] - 0.001) used.add(style);
    }
    if (device.exposed.length) used.add(data.exposed);
  }
  return [...used].sort((a, b) => a - b);
}

function fillLegend() {
  for (const style of usedStyles()) {
    const button = element("button"), color = element("i");
    color.style.background = styles[style][1];
    button.append(color, styles[style][0]);
    button.title = "click: hide or show; double click: show only this";
    button.setAttribute("aria-pressed", "true");
    button.dataset.style = style;
    button.addEventListener("click", () => { view.hidden[styleHidden(style) ? "delete" : "add"](style); pressed(); });
    button.addEventListener("dblclick", () => {
      view.hidden = new Set(usedStyles().filter((other) => other !== style));
      pressed();
    });
    $("legend").append(button);
  }
}

function pressed() {
  for (const button of $("legend").children) {
    button.setAttribute("aria-pressed", String(!styleHidden(Number(button.dataset.style))));
  }
  search();
}
