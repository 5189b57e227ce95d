// Runs before the first paint, so that the page does not flash in the wrong theme.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("halfway.theme");
  } catch {
    // This page may not use storage, so the system's theme applies.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
