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

  // Components take the six colours from the field's own on; then dashed, then dotted.
  const DASHES = [undefined, [6, 4], [2, 3]];
  const STYLES = ["solid", "dashed", "dotted"];

  // The lines of one chart, each { path, component, order }: those of the second field are
  // dashed at once, and so on. A colour that another line has already gives way to one that
  // is free, as long as there is one.
  mmr.styles = (lines) => {
    const uses = new Array(NUM_COLOURS).fill(0);
    return lines.map(({ path, component, order }) => {
      const own = mmr.slot(path) + component;
      let slot = own % NUM_COLOURS;
      for (let k = 1; k < NUM_COLOURS; k++) {
        const other = (own + k) % NUM_COLOURS;
        if (uses[other] < uses[slot]) slot = other;
      }
      uses[slot]++;
      return { slot, dash: Math.min(2, Math.floor(component / NUM_COLOURS) + order) };
    });
  };

  mmr.series = ({ slot, dash }) => ({ colour: mmr.token(`s${slot}`), dash: DASHES[dash] });

  mmr.swatch = ({ slot, dash }) =>
    mmr.el("span", {
      class: "swatch",
      css: { "border-color": `var(--s${slot})`, "border-top-style": STYLES[dash] },
    });

  // Of a field in a list of fields. Of those with one colour, later ones are dashed.
  mmr.swatchOf = (path, order = 0) => mmr.swatch({ slot: mmr.slot(path), dash: Math.min(2, order) });
})();
