"use strict";
// Before the first paint, so that a dark page never flashes white.
(() => {
  let stored = null;
  try {
    stored = localStorage.getItem("mmreplay-theme");
  } catch {
    // Storage is switched off: the system's colours are used.
  }
  const dark = stored
    ? stored === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
