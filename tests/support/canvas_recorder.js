// What the page draws on each canvas since it was last cleared, by the canvas' id. Tests run it before the page's script.
window.drawn = {};
{
  const pens = CanvasRenderingContext2D.prototype;
  const nothing = () => ({ texts: [], rects: [], frames: [], lines: 0 });
  const record = (method, note) => {
    const original = pens[method];
    pens[method] = function (...given) {
      note(window.drawn[this.canvas.id] ||= nothing(), this, ...given);
      return original.apply(this, given);
    };
  };
  record("clearRect", (of) => Object.assign(of, nothing()));
  record("fillText", (of, pen, text, x, y) => {
    of.texts.push({ text, x, y, width: pen.measureText(text).width, color: pen.fillStyle });
  });
  record("fillRect", (of, pen, x, y, width, height) => {
    of.rects.push({ x, y, width, height, color: pen.fillStyle, alpha: pen.globalAlpha });
  });
  record("stroke", (of) => { of.lines++; });
  record("strokeRect", (of, pen, x, y, width, height) => {
    of.frames.push({ x, y, width, height, dashed: pen.getLineDash().length > 0 });
  });
}
