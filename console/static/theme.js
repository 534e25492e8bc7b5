// Runs before the first paint, so that a chosen theme does not flash.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("tickwheel-theme"); } catch { /* storage is switched off */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
