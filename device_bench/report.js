"use strict";
// The page follows the system's colours; the button overrides them and remembers.
(() => {
  const button = document.getElementById("theme"), root = document.documentElement;
  const names = ["auto", "light", "dark"];
  let kept = "auto";
  try { kept = localStorage.getItem("edgeqkv-theme") || "auto"; } catch { /* no storage: fine */ }
  const show = (name) => {
    if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
    button.textContent = "Theme: " + name;
    try { localStorage.setItem("edgeqkv-theme", name); } catch { /* no storage: fine */ }
    kept = name;
  };
  show(names.includes(kept) ? kept : "auto");
  button.hidden = false;
  button.addEventListener("click", () => show(names[(names.indexOf(kept) + 1) % 3]));
})();
