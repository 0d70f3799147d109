// Draws lines over time into an SVG: no library, no styles of its own but classes.
const SVG = "http://www.w3.org/2000/svg";
const LEFT = 46, RIGHT = 66, TOP = 8, BOTTOM = 20, LABEL_GAP = 13;

export function add(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// The smallest of 1, 2, 5 times a power of ten that divides `most` into at most four.
function stepFor(most) {
  const power = 10 ** Math.floor(Math.log10(most / 4));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => most / one <= 4);
}

export function clock(seconds, withSeconds = true) {
  return new Date(seconds * 1000).toISOString().slice(11, withSeconds ? 19 : 16);
}

// Draws `series` [{name, classes, values}] whose values (null: unknown) end at `end` and are `slot` seconds apart.
export function draw(svg, readout, { series, end, slot, count, format, most }) {
  const width = svg.clientWidth || 400, height = svg.clientHeight || 150;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const top = Math.max(most || 0, ...series.flatMap((one) => one.values.map((value) => value ?? 0))) || 1;
  const step = stepFor(top), highest = most || Math.ceil(top / step) * step;
  const begin = end - (count - 1) * slot;
  const x = (at) => LEFT + ((at - begin) / (end - begin)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / highest) * (height - TOP - BOTTOM);
  for (let value = 0; value <= highest * 1.001; value += step) {
    add(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    add(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, most ? format(value) : String(Number(value.toPrecision(3))));
  }
  for (let at = Math.ceil(begin / 300) * 300; at <= end; at += 300) {
    add(svg, "text", { x: x(at), y: height - 5, "text-anchor": "middle" }, clock(at, false));
  }
  const labels = [];
  for (const { name, classes, values } of series) {
    let points = [];
    const finish = () => {
      // A single point is a line of no length, which its round ends make a dot.
      if (points.length) add(svg, "polyline", { class: classes, points: [...points, points.at(-1)].join(" ") });
      points = [];
    };
    values.forEach((value, index) => {
      if (value === null) finish();
      else points.push(`${x(begin + index * slot).toFixed(1)},${y(value).toFixed(1)}`);
    });
    finish();
    const last = values.findLast((value) => value !== null);
    // Dashed and dotted lines belong to a solid one, which has the name.
    if (last !== undefined && !classes.includes(" ")) labels.push({ name, classes, y: y(last) + 4 });
  }
  labels.sort((one, other) => one.y - other.y);
  labels.forEach((one, index) => { if (index) one.y = Math.max(one.y, labels[index - 1].y + LABEL_GAP); });
  for (let index = labels.length - 1; index >= 0; index--) {
    const below = index + 1 < labels.length ? labels[index + 1].y - LABEL_GAP : height - BOTTOM + 4;
    labels[index].y = Math.min(labels[index].y, below);
    const { name, classes, y: at } = labels[index];
    add(svg, "text", { class: classes.split(" ")[0], x: width - RIGHT + 6, y: at }, name);
  }
  const cross = add(svg, "line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  svg.onpointermove = (event) => {
    const share = (event.offsetX - LEFT) / (width - LEFT - RIGHT);
    const index = Math.min(count - 1, Math.max(0, Math.round(share * (count - 1))));
    const told = series.filter((one) => one.values[index] !== null).map((one) => `${one.name} ${format(one.values[index])}`);
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", x(begin + index * slot));
    cross.setAttribute("x2", x(begin + index * slot));
    readout.textContent = [clock(begin + index * slot), ...told].join("  ");
  };
  svg.onpointerleave = () => {
    cross.setAttribute("visibility", "hidden");
    readout.textContent = "";
  };
}
