// Before anything is drawn: the theme that was chosen here, so that the page does not flash in another one.

try {
  const theme = JSON.parse(localStorage.getItem("monotape.theme"));
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage: the system's theme.
}
