// Canvases in the size of their elements and the sharpness of the screen, colors of the theme, texts that fit.
const theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "muted", "line", "band", "mark"]) theme[name] = style.getPropertyValue(`--${name}`);
}

function penOf(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return pen;
}

const widths = new Map();

function widthOf(pen, text) {
  const key = pen.font + text;
  if (!widths.has(key)) {
    if (widths.size > 50000) widths.clear();
    widths.set(key, pen.measureText(text).width);
  }
  return widths.get(key);
}

// The text if it fits into this width, its beginning with an ellipsis if that has three letters, otherwise "".
function fitting(pen, text, width) {
  if (width < 14) return "";
  const whole = widthOf(pen, text);
  if (whole <= width) return text;
  for (let letters = Math.floor(text.length * width / whole); letters >= 3; letters--) {
    const cut = text.slice(0, letters) + "…";
    if (pen.measureText(cut).width <= width) return cut;
  }
  return "";
}

// How the time axis maps to pixels: the same for the ruler, the lanes and the memory.
const laneWidth = () => $("lanes").clientWidth - LEFT - RIGHT;
const xOf = (time) => LEFT + (time - view.from) / (view.to - view.from) * laneWidth();
const timeAt = (x) => view.from + (x - LEFT) / laneWidth() * (view.to - view.from);
