"use strict";
// A field has one colour on every screen, in every buffer and session: by its name.
(() => {
  const ROLES = { reward: 0, action: 1, observation: 2, truncated: 4, terminated: 5 };
  const NUM_COLOURS = 6;

  mmr.token = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  mmr.isDark = () => document.documentElement.dataset.theme === "dark";

  mmr.slot = (path) => {
    if (path in ROLES) return ROLES[path];
    let hash = 0x811c9dc5; // FNV-1a
    for (const byte of new TextEncoder().encode(path)) {
      hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
    }
    return hash % NUM_COLOURS;
  };

  // Components take the six colours from the field's own on; then dashed, then dotted.
  mmr.series = (path, component = 0) => ({
    colour: mmr.token(`s${(mmr.slot(path) + component) % NUM_COLOURS}`),
    dash: component < 6 ? undefined : component < 12 ? [6, 4] : [2, 3],
  });

  mmr.swatch = (path, component = 0) => {
    const style = component < 6 ? "solid" : component < 12 ? "dashed" : "dotted";
    return mmr.el("span", {
      class: "swatch",
      css: {
        "border-color": `var(--s${(mmr.slot(path) + component) % NUM_COLOURS})`,
        "border-top-style": style,
      },
    });
  };
})();
