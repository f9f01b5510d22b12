"use strict";
// Elements and texts. Nothing here parses a string as HTML: text is text.
(() => {
  mmr.el = (tag, props = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (value == null || value === false) continue;
      if (name === "class") element.className = value;
      else if (name === "on") {
        for (const [event, handler] of Object.entries(value)) {
          element.addEventListener(event, handler);
        }
      } else if (name === "css") {
        for (const [property, text] of Object.entries(value)) {
          element.style.setProperty(property, text);
        }
      } else if (name in element && typeof value !== "string") element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children.flat(3).filter((child) => child != null && child !== false));
    return element;
  };
  const el = mmr.el;

  const whole = new Intl.NumberFormat("en");
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const all = new Intl.NumberFormat("en", { maximumSignificantDigits: 15 }); // a float64 has

  mmr.count = (n) => whole.format(Math.round(n));

  mmr.number = (value) => {
    if (value == null || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e7 && size < 1e16) { // such as time stamps
      return Number.isInteger(value) ? whole.format(value) : all.format(value);
    }
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return digits.format(value || 0); // not -0
  };

  // A whole number with all of its digits; of more than 15 it is a text.
  mmr.exact = (value) => whole.format(typeof value === "string" ? BigInt(value) : value);

  // Sum and difference of numbers as texts: exact where both are whole.
  const isWhole = (text) => /^-?\d+$/.test(text);
  mmr.minus = (a, b) => (isWhole(a) && isWhole(b) ? Number(BigInt(a) - BigInt(b)) : Number(a) - Number(b));
  mmr.plus = (text, value) =>
    isWhole(text) ? whole.format(BigInt(text) + BigInt(Math.round(value))) : mmr.number(Number(text) + value);

  mmr.short = (n) => {
    for (const [from, unit, letter] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
      if (Math.abs(n) >= from) return `${digits.format(+(n / unit).toPrecision(3))} ${letter}`;
    }
    return mmr.count(n);
  };

  mmr.size = (nbytes) => {
    let unit = 0;
    while (nbytes >= 1024 && unit < 5) {
      nbytes /= 1024;
      unit++;
    }
    return `${!unit ? nbytes : nbytes < 999.5 ? nbytes.toPrecision(3) : nbytes.toFixed(0)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
  };

  mmr.ago = (seconds) => {
    for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= 2 * length) return `${Math.round(seconds / length)} ${unit}`;
    }
    return `${Math.max(0, Math.round(seconds))} s`;
  };

  mmr.share = (x) => {
    if (x == null) return "–";
    if (x > 0 && x < 0.0005) return "< 0.1 %";
    return `${x >= 0.0995 || x === 0 ? (100 * x).toFixed(0) : (100 * x).toFixed(1)} %`;
  };

  mmr.plural = (n, one, many = `${one}s`) => `${mmr.count(n)} ${n === 1 ? one : many}`;

  mmr.mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  // A card with a title, a note beside it, and anything below.
  mmr.card = (className, title, note, ...children) =>
    el(
      "section",
      { class: `card ${className}` },
      el("header", {}, el("h2", {}, title), note ? el("span", { class: "note" }, note) : null),
      ...children,
    );

  mmr.muted = (...text) => el("span", { class: "muted" }, ...text);

  // A control with its name before it.
  mmr.field = (name, control, className = "field") => el("label", { class: className }, name, control);

  // A list to choose from, of values and texts.
  mmr.select = (props, change, choices, chosen) =>
    el(
      "select",
      { ...props, on: { change } },
      choices.map(([value, text]) => el("option", { value: String(value), selected: value === chosen }, text)),
    );

  // A button that is on or off.
  mmr.toggle = (props, isOn, turn, ...children) => {
    const button = el(
      "button",
      { ...props, type: "button", "aria-pressed": String(isOn), on: { click: () => {
        isOn = !isOn;
        button.setAttribute("aria-pressed", String(isOn));
        turn(isOn);
      } } },
      ...children,
    );
    return button;
  };

  // What a colour means, in a legend.
  mmr.key = (name, colour) =>
    el("span", { class: "key" }, el("span", { class: "swatch dot", css: { background: `var(--${colour})` } }), name);

  mmr.imageOf = ({ fields }) =>
    fields.find((each) => each.image && each.role === "observation") ?? fields.find((each) => each.image);

  mmr.nothing = (text) => el("p", { class: "muted nothing" }, text);

  // Names and values in two columns.
  mmr.pairs = (rows) =>
    el(
      "dl",
      { class: "now" },
      rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    );

  mmr.button = (text, label, handler, className = "btn") =>
    el(
      "button",
      { class: className, type: "button", "aria-label": label, title: label, on: { click: handler } },
      text,
    );

  mmr.calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
})();
