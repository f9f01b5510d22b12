"use strict";
// A field has one colour on every screen, in every buffer and session: by its name.
(() => {
  const ROLES = { reward: 0, action: 1, observation: 2, truncated: 4, terminated: 5 };
  const NUM_COLOURS = 6;

  mmr.token = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  mmr.isDark = () => document.documentElement.dataset.theme === "dark";

  mmr.slot = (path) => {
    if (Object.hasOwn(ROLES, path)) return ROLES[path];
    let hash = 0x811c9dc5; // FNV-1a
    for (const byte of new TextEncoder().encode(path)) {
      hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
    }
    return hash % NUM_COLOURS;
  };

  // Components take the six colours from the field's own on; then dashed, then dotted. In
  // a chart of several fields, those of the second one are dashed at once, and so on.
  const DASHES = [undefined, [6, 4], [2, 3]];
  const STYLES = ["solid", "dashed", "dotted"];
  const dashOf = (component, order) => Math.min(2, Math.floor(component / NUM_COLOURS) + order);

  mmr.series = (path, component = 0, order = 0) => ({
    colour: mmr.token(`s${(mmr.slot(path) + component) % NUM_COLOURS}`),
    dash: DASHES[dashOf(component, order)],
  });

  mmr.swatch = (path, component = 0, order = 0) =>
    mmr.el("span", {
      class: "swatch",
      css: {
        "border-color": `var(--s${(mmr.slot(path) + component) % NUM_COLOURS})`,
        "border-top-style": STYLES[dashOf(component, order)],
      },
    });
})();
